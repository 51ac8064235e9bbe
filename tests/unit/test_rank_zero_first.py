"""Data is downloaded once for all ranks, by two real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ddp_hpc.train.recipes.rank_zero_first import rank_zero_first
from tests.unit.two_ranks_download import TIMEOUT_S


class Outcome(NamedTuple):
    """What the two ranks wrote, and who downloaded."""

    ranks: list[dict[str, Any]]
    downloads: str


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    root = tmp_path_factory.mktemp("data")
    script = Path(__file__).with_name("two_ranks_download.py")
    package = Path(__file__).parents[2]
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(package)}
    ranks = [subprocess.Popen([sys.executable, script, str(rank), root], env=environ) for rank in range(2)]
    assert [rank.wait(timeout=90) for rank in ranks] == [0, 0]
    written = [json.loads((root / f"rank-{rank}.json").read_text()) for rank in range(2)]
    return Outcome(written, (root / "downloads").read_text())


def test_only_rank_zero_downloads_and_all_get_the_data(outcome: Outcome) -> None:
    assert outcome.downloads == "rank 0\n"
    assert [rank["got"] for rank in outcome.ranks] == ["the data", "the data"]


def test_the_others_wait_longer_than_the_process_groups_timeout(outcome: Outcome) -> None:
    assert outcome.ranks[1]["seconds"] > TIMEOUT_S
    assert outcome.ranks[1]["got"] == "the data"


@pytest.mark.long
def test_a_failed_download_is_told_to_every_rank_in_the_same_words(outcome: Outcome) -> None:
    assert [rank["told"] for rank in outcome.ranks] == ["URLError: <urlopen error no route to host>"] * 2


def test_a_process_without_a_group_may_write() -> None:
    assert rank_zero_first(lambda may_write: may_write) is True
