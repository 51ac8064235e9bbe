"""Where a run goes: Slurm where there is one, this machine elsewhere, and an error where Slurm was asked for in vain."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_hpc.cli import main
from ddp_hpc.launch.submission.submit_checks import capacity

NO_CONFIG = "echo 'scontrol: fatal: Could not establish a configuration source' >&2; exit 1"
DOWN = "echo 'Slurmctld(primary) at head is DOWN'; exit 1"
UP = "echo 'Slurmctld(primary) at head is UP'"


@pytest.fixture
def here(_users_part_unchecked: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current directory, with a configuration; its `bin` is all of PATH."""
    (tmp_path / "run.yaml").write_text("recipe: {target: image_classification}\n")
    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def install(here: Path, **commands: str) -> None:
    for name, body in commands.items():
        (here / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (here / "bin" / name).chmod(0o755)


def test_slurm_without_sbatch_is_one_error_that_says_what_to_do(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "run.yaml", "--cluster", "slurm"]) == 2

    told = capsys.readouterr().err
    assert told.startswith("error: ddp-hpc needs Slurm's `sbatch`, but PATH on this host has none.")
    assert "--cluster local" in told
    assert told.count("\n") == 1
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("scontrol", "goes_to_slurm"), [(UP, True), (DOWN, True), (NO_CONFIG, False)], ids=["up", "down", "no cluster"]
)
def test_auto_is_slurm_where_there_is_a_cluster_even_one_that_does_not_answer(
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    scontrol: str,
    goes_to_slurm: bool,
) -> None:
    monkeypatch.setattr(capacity, "refuse_node_local_path", lambda _: None)  # the test's own may be a node's own
    install(here, sbatch="echo 'sbatch: error: Unable to contact slurm controller' >&2; exit 1", scontrol=scontrol)

    assert main(["submit", "run.yaml", "--dry-run"]) == 0

    assert ("#SBATCH --nodes=1" in capsys.readouterr().out) == goes_to_slurm


def test_auto_is_this_machine_where_slurm_is_not(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "run.yaml", "--dry-run"]) == 0

    assert "# would run: " in capsys.readouterr().out
