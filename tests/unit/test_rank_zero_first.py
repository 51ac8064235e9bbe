"""Data is downloaded once for all ranks, by two real processes."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.error import URLError

import pytest

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.recipes.rank_zero_first import rank_zero_first
from tests.distributed.processes import in_group


class SlowDownload:
    """Behaves like torchvision's data, and keeps count of its downloads."""

    def __init__(self, root: Path, rank: int, *, download: bool) -> None:
        if download:
            with (root / "downloads").open("a") as count:
                count.write(f"rank {rank}\n")
            time.sleep(0.3)
            (root / "data").write_text("the data")
        if not (root / "data").exists():
            raise RuntimeError("Dataset not found. You can use download=True to download it")
        self.text = (root / "data").read_text()


def _fail(_may_write: bool) -> SlowDownload:
    raise URLError("no route to host")


class Outcome(NamedTuple):
    """What a rank got, and what it was told when the download failed."""

    got: str
    told: str


def _ask_twice(group: Group, root: Path) -> Outcome:
    """Ask twice, once in vain."""
    got = rank_zero_first(lambda may_write: SlowDownload(root, group.rank_info.rank, download=may_write)).text
    try:
        told = f"nothing, but got {rank_zero_first(_fail).text}"
    except ConfigError as error:
        told = str(error)
    return Outcome(got, told)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def ranks(root: Path) -> list[Outcome]:
    return in_group(2, partial(_ask_twice, root=root), root / "ranks")


def test_only_rank_zero_downloads_and_all_get_the_data(ranks: list[Outcome], root: Path) -> None:
    assert (root / "downloads").read_text() == "rank 0\n"
    assert [rank.got for rank in ranks] == ["the data", "the data"]


def test_a_failed_download_is_told_to_every_rank_in_the_same_words(ranks: list[Outcome]) -> None:
    assert [rank.told for rank in ranks] == ["URLError: <urlopen error no route to host>"] * 2


def test_a_process_without_a_group_may_write() -> None:
    assert rank_zero_first(lambda may_write: may_write) is True
