"""What holds for every test: which process runs it, and that a machine's own settings do not reach it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

# A shared machine may be slow at any moment; a slow example is no failure. The campaign of hostile input tries 200,000.
settings.register_profile("ddp_hpc", deadline=None)
settings.load_profile("ddp_hpc")

FOREIGN_PREFIXES = ("DDP_HPC", "SLURM_", "MASTER_", "TORCHELASTIC_")
FOREIGN_NAMES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"}


BEGAN = time.monotonic()
"""When this process, one of several under `-n`, was started."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a caller with little time bound a whole session."""
    parser.addoption(
        "--stop-after-min", type=float, help="begin no test after so many minutes; skip the rest, and say so"
    )
    parser.addoption(
        "--keep-failures", type=Path, metavar="FILE", help="write failed tests and their output there, a JSON line each"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Hide that the environment is activated, as it is not in CI; begin the file of `--keep-failures` anew, in one process.

    Of several processes, each computes with one thread: OpenMP's threads wait for each other by spinning, and share the cores with
    all the others'.
    """
    if sys.prefix != sys.base_prefix:
        directories = os.environ["PATH"].split(os.pathsep)
        os.environ["PATH"] = os.pathsep.join(one for one in directories if one != f"{sys.prefix}/bin")
    if hasattr(config, "workerinput"):
        import torch

        torch.set_num_threads(1)
        return
    path = config.getoption("--keep-failures")
    if path is not None:
        path.unlink(missing_ok=True)
        config.pluginmanager.register(_FailureKeeper(path))


class _FailureKeeper:
    """Writes each failed report into a file, for `tests.once_more`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"exit_status": int(exitstatus)}) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._keep(report, "collection")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._keep(report, str(report.when))

    def _keep(self, report: pytest.CollectReport | pytest.TestReport, phase: str) -> None:
        if report.failed:
            sections = [f"--- {title} ---\n{text}" for title, text in report.sections]
            output = "\n".join([f"({phase})", report.longreprtext, *sections])
            with self._path.open("a") as file:
                file.write(json.dumps({"test": report.nodeid, "output": output}) + "\n")


@pytest.hookimpl(tryfirst=True)  # before any fixture is made for the test
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what `--stop-after-min` leaves no time for."""
    limit_min = item.config.getoption("--stop-after-min")
    if limit_min is not None and time.monotonic() - BEGAN > 60 * limit_min:
        pytest.skip(f"not begun: the {limit_min:g} minutes of --stop-after-min were over")


SHARE_RUNS = (
    "tests/architecture/test_package.py",
    "tests/contract/",
    "tests/distributed/",
    "tests/unit/test_rank_zero_first.py",
    "tests/unit/test_stacks.py",
)
"""Where tests of one file look at the same runs, or at the same wheel, which each process would make anew."""


def part_of(nodeid: str) -> str:
    """Return what one process gets as a whole: all tests on the Slurm cluster, for there is one; a file of `SHARE_RUNS`.

    Any other test goes by itself to whichever process is free.
    """
    if nodeid.startswith("tests/slurm/"):
        return "cluster"
    return nodeid.split("::", 1)[0] if nodeid.startswith(SHARE_RUNS) else nodeid


def in_turn(nodeids: list[str]) -> list[str]:
    """Return tests in the order in which several processes begin them: the cluster's, then those that share runs among all others.

    Those wait most of the time. Begun together they would leave the cores idle; begun late they would run alone in the end.
    """
    parts = [part_of(nodeid) for nodeid in nodeids]
    shared = dict.fromkeys(part for part, nodeid in zip(parts, nodeids, strict=True) if part not in {nodeid, "cluster"})
    turns = {nodeid: number / len(nodeids) for number, nodeid in enumerate(nodeids)}
    turns |= {part: 0.7 * number / len(shared) for number, part in enumerate(shared)} | {"cluster": -1.0}
    return sorted(nodeids, key=lambda nodeid: turns[part_of(nodeid)])


@pytest.hookimpl(trylast=True)  # after the shuffle
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where there are several processes, let tests begin in the order of `in_turn`."""
    if hasattr(config, "workerinput"):
        order = {nodeid: number for number, nodeid in enumerate(in_turn([item.nodeid for item in items]))}
        items.sort(key=lambda item: order[item.nodeid])


class _ByWhatTheyShare(LoadScopeScheduling):  # type: ignore[misc]  # untyped
    """Deals tests out in the parts of `part_of`."""

    def _split_scope(self, nodeid: str) -> str:
        return part_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _ByWhatTheyShare:
    """Deal tests out where there are several processes (`-n`)."""
    config.option.loadscopereorder = False  # the order of collection is that of `in_turn`
    return _ByWhatTheyShare(config, log)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide what a user's shell or a surrounding job has set."""
    for name in list(os.environ):
        if name.startswith(FOREIGN_PREFIXES) or name in FOREIGN_NAMES:
            monkeypatch.delenv(name)
    monkeypatch.setenv("DDP_HPC_SITE_PROFILE", "")  # none, wherever this machine keeps one


@pytest.fixture
def _users_part_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no process that imports torch to check a recipe before the queue, where something else is tested."""
    monkeypatch.setattr("ddp_hpc.launch.submission.slurm.check_users_part", lambda *_: [])


@pytest.fixture(autouse=True)
def _no_signal_is_ignored() -> Iterator[None]:
    """Undo what `nohup` and `&` do to their commands: programs that a test starts would ignore these signals, too."""
    ignored = [number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(autouse=True)
def _null_device_stays() -> Iterator[None]:
    """Name the test that, run as root, puts a file in the place of /dev/null."""
    yield
    assert Path(os.devnull).is_char_device()
