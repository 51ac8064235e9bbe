"""Data is downloaded once for all ranks, by two real processes."""

from __future__ import annotations

import time
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.error import URLError

import pytest
import torch.distributed as dist

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.recipes.rank_zero_first import rank_zero_first
from tests.distributed.processes import in_group

TIMEOUT_S = 0.1


class SlowDownload:
    """Behaves like torchvision's data, and keeps count of its downloads, which take longer than the group's timeout."""

    def __init__(self, root: Path, *, download: bool) -> None:
        if download:
            with (root / "downloads").open("a") as count:
                count.write(f"rank {dist.get_rank()}\n")
            time.sleep(5 * TIMEOUT_S)
            (root / "data").write_text("the data")
        if not (root / "data").exists():
            raise RuntimeError("Dataset not found. You can use download=True to download it")
        self.text = (root / "data").read_text()


class Outcome(NamedTuple):
    """What a rank got, after how long, and what it was told when the download failed."""

    got: str
    seconds: float
    told: str


def ask_twice(_group: Group, root: Path) -> Outcome:
    """Ask for data, and once more in vain."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch 2.15 has a public name for it
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S))  # once they have met, which takes longer
    began = time.monotonic()
    got = rank_zero_first(lambda may_write: SlowDownload(root, download=may_write)).text
    seconds = time.monotonic() - began
    try:
        told = f"nothing, but got {rank_zero_first(_fail).text}"
    except ConfigError as error:
        told = str(error)
    return Outcome(got, seconds, told)


def _fail(_may_write: bool) -> SlowDownload:
    raise URLError("no route to host")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def ranks(root: Path) -> list[Outcome]:
    return in_group(2, partial(ask_twice, root=root), root / "group")


def test_only_rank_zero_downloads_and_all_get_the_data(root: Path, ranks: list[Outcome]) -> None:
    assert (root / "downloads").read_text() == "rank 0\n"
    assert [rank.got for rank in ranks] == ["the data", "the data"]


def test_the_others_wait_longer_than_the_process_groups_timeout(ranks: list[Outcome]) -> None:
    assert ranks[1].seconds > TIMEOUT_S
    assert ranks[1].got == "the data"


def test_a_failed_download_is_told_to_every_rank_in_the_same_words(ranks: list[Outcome]) -> None:
    assert [rank.told for rank in ranks] == ["URLError: <urlopen error no route to host>"] * 2


def test_a_process_without_a_group_may_write() -> None:
    assert rank_zero_first(lambda may_write: may_write) is True
