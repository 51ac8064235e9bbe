"""Which files count as those that a sample is read from."""

from __future__ import annotations

import os
import threading
from multiprocessing import resource_sharer
from pathlib import Path

import pytest
import torch
from torch import multiprocessing as torch_multiprocessing

from ddp_hpc.train.data.sample_files import record_sources, size_and_hash_of


@pytest.mark.parametrize(
    ("thread", "is_one"), [("checkpoint-writer", True), ("decoder", False), ("Thread-1 (_serve)", False)]
)
def test_a_checkpoint_that_is_written_meanwhile_is_no_source_of_a_sample_and_what_a_readers_thread_opens_is(
    tmp_path: Path, thread: str, is_one: bool
) -> None:
    sample, other = tmp_path / "9.json", tmp_path / "other"
    for path in (sample, other):
        path.write_text("{")
        os.utime(path, (0, 0))

    beside = threading.Thread(target=other.read_text, name=thread)

    with record_sources() as sources:
        beside.start()
        beside.join()
        sample.read_text()

    assert size_and_hash_of(sources).startswith("1 bytes, sha256 ") == is_one


def test_a_batch_that_is_sent_meanwhile_is_no_source_of_a_sample(tmp_path: Path) -> None:
    sample = tmp_path / "9.json"
    sample.write_text("{")
    os.utime(sample, (0, 0))
    resource_sharer.stop()  # the first batch that is sent starts its server
    context = torch_multiprocessing.get_context("fork")
    queue = context.Queue()
    training = context.Process(target=queue.get)
    training.start()

    with record_sources() as sources:
        queue.put(torch.ones(3))
        training.join()
        sample.read_text()

    assert training.exitcode == 0
    queue.close()
    queue.join_thread()
    resource_sharer.stop()  # other tests ask whether this process has threads

    assert size_and_hash_of(sources).startswith("1 bytes, sha256 ")
