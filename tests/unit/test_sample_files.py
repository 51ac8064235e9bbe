"""Which files count as those that a sample is read from."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddp_hpc.train.data.sample_files import recorded_sources


@pytest.mark.parametrize(("thread", "is_one"), [("checkpoint-writer", True), ("decoder", False)])
def test_a_checkpoint_that_is_written_meanwhile_is_no_source_of_a_sample_and_what_a_readers_thread_opens_is(
    tmp_path: Path, thread: str, is_one: bool
) -> None:
    sample, other = tmp_path / "9.json", tmp_path / "other"
    for path in (sample, other):
        path.write_text("{")
        os.utime(path, (0, 0))

    with ThreadPoolExecutor(1, thread_name_prefix=thread) as pool, recorded_sources() as sources:
        pool.submit(other.read_text).result()
        sample.read_text()

    assert sources.content().startswith("1 bytes, sha256 ") == is_one
