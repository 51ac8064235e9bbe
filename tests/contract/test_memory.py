"""The back end of the tests keeps the contract, and callers know it by its line in the table alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddp_hpc
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cli import main
from ddp_hpc.launch.submission import local, slurm
from ddp_hpc.launch.submission.backend import BACKENDS, Backend, backend_of, choose_backend, load_backend
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from tests.contract import driver, memory
from tests.contract.suite import Answer, BackendContract, furnished

FULFILLED: tuple[Backend, ...] = (local, slurm, memory)
"""mypy fails here on a module that lacks a function of the protocol, or has another signature."""


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    BACKENDS["memory"] = ("tests.contract.memory", None)
    yield
    del BACKENDS["memory"]


class InThisProcess:
    """Calls a back end here."""

    may_commit_when_cancelled = False

    def __init__(self, backend: str, folder: Path, refused: str) -> None:
        self.backend, self.folder, self.refused = backend, furnished(folder), refused

    def call(self, function: str, name: str, *words: str) -> Answer:
        environ = {**os.environ, "DDP_HPC_SITE_PROFILE": ""}
        return driver.perform([self.backend, function, str(self.folder / "trial.yaml"), name, *words], environ)


class TestMemory(BackendContract):
    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, tmp_path_factory: pytest.TempPathFactory) -> InThisProcess:
        return InThisProcess("memory", tmp_path_factory.mktemp("memory"), "resources.nodes=2")


def test_every_line_of_the_table_leads_to_a_back_end_of_that_name() -> None:
    assert {name: load_backend(name).NAME for name in BACKENDS} == {name: name for name in BACKENDS}


def test_a_line_in_the_table_is_all_that_the_command_line_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(furnished(tmp_path))
    submit, run = ["submit", "trial.yaml", "name=net", "--cluster", "memory"], RunDir(tmp_path / "runs" / "net")

    assert main([*submit, "--dry-run"]) == 0
    assert "# would run: train net" in capsys.readouterr().out
    assert main([*submit, "--dry-run", "--explain"]) == 2
    assert "`--explain` can describe runs on local and slurm" in capsys.readouterr().err
    assert main(submit) == 0
    assert main(["stop", "net"]) == 0
    assert main([*submit, "--wait"]) == 0
    assert main(["cancel", "net"]) == 2
    assert main(["requeue", "net"]) == 2
    assert main(["delete", "net", "--yes"]) == 0

    assert not run.path.exists()


def test_a_line_in_the_table_is_all_that_the_python_interface_needs(tmp_path: Path) -> None:
    spec = ddp_hpc.load(furnished(tmp_path) / "trial.yaml", {"runs_dir": tmp_path}, cluster="memory")

    job = ddp_hpc.submit(spec, cluster="memory")
    job.run.console.write_text("hello\nworld\n")
    lines = list(job.logs())
    job.stop()
    stopped = Ledger.read(job.run).attempts[-1].ending
    again = ddp_hpc.submit(spec, cluster="memory")

    assert (job.cluster, job.attempt, lines, stopped) == ("memory", 0, ["hello", "world"], "stopped")
    assert (again.attempt, again.result()) == (1, {"loss": 0.5})
    with pytest.raises(ConfigError, match="ddp-hpc submit"):
        again.stop()
    ddp_hpc.submit(spec, cluster="memory", fresh=True).cancel()
    assert Ledger.read(job.run).attempts[-1].ending == "cancelled"


def test_a_back_end_of_a_newer_version_is_named_and_never_taken_for_another(tmp_path: Path) -> None:
    spec = ddp_hpc.load(furnished(tmp_path) / "trial.yaml", {"runs_dir": tmp_path}, cluster="memory")
    job = ddp_hpc.submit(spec, cluster="memory")
    job.cancel()

    place = BACKENDS.pop("memory")
    try:
        with pytest.raises(
            ConfigError, match="The cluster is 'memory', but this version of ddp-hpc knows only local, slurm"
        ):
            backend_of(job.run)
        with pytest.raises(ConfigError, match="The cluster is 'memory'"):
            ddp_hpc.submit(spec, cluster="memory")
        assert job.state == "cancelled", "whoever only reads needs no back end"
    finally:
        BACKENDS["memory"] = place


def test_auto_skips_a_back_end_whose_command_is_not_on_path_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BACKENDS, "slurm", ("no.such.module", "sbatch"))

    assert choose_backend("auto", {"PATH": str(tmp_path)}).NAME == "local"
