"""Checkpoints that ddp_hpc 0.1.0 wrote before there was format 2: tests/data/format-1, made by `exact_training`.

What a run came to from each, by that code and in each world, stands in `expected.json`.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from ddp_hpc.run.checkpoints.checkpoint_names import checkpoint_path
from ddp_hpc.run.checkpoints.checkpoint_store import checkpoint_digest, read_manifest, verify_checkpoint
from ddp_hpc.run.run_dir.paths import RunDir
from tests.distributed.exact_training import LAST, SAVED, finish
from tests.distributed.processes import in_group

KEPT = Path(__file__).parents[1] / "data" / "format-1"
EXPECTED = json.loads((KEPT / "expected.json").read_text())


@pytest.mark.parametrize("written_by", [1, 2])
def test_a_checkpoint_of_format_1_verifies_and_keeps_its_digest(written_by: int) -> None:
    path = KEPT / f"world-{written_by}"

    assert verify_checkpoint(path).format == 1
    assert checkpoint_digest(path) == EXPECTED[f"{written_by}"]["digest"]


@pytest.mark.parametrize(("written_by", "world_size"), [(1, 1), (2, 2), (1, 2), (2, 1)])
def test_a_run_goes_on_from_format_1_to_the_bits_it_had_then(written_by: int, world_size: int, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    shutil.copytree(KEPT / f"world-{written_by}", checkpoint_path(run, SAVED))

    ranks = in_group(world_size, partial(finish, path=run.path, attempt=1), tmp_path / "ours")

    losses = [json.loads(line)["loss"] for line in ranks[0]["metrics"] if '"train"' in line]
    assert {"digest": ranks[0]["digest"], "losses": losses} == EXPECTED[f"{written_by} to {world_size}"]
    assert read_manifest(checkpoint_path(run, LAST)).world_size == world_size
