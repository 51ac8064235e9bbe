"""Whose a run is: whatever the umask, nobody else may write to it; what others may write to is not run."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddp_hpc.base.durable import make_directories, replace_text, scratch_path
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cli import main
from ddp_hpc.job import supervisor
from ddp_hpc.launch.submission.run_dir_setup import make_run_dir, notes_on_writable_parents
from ddp_hpc.launch.submission.submit_checks import capacity
from ddp_hpc.launch.sweep.sweep_dir import SweepDir
from ddp_hpc.run.run_dir import write_permissions
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import write_rendezvous_token
from ddp_hpc.run.run_dir.replays import AttemptInputs, write_inputs
from tests.made_run import make_run
from tests.unit.held_signals import signals_held_back

RECIPE = """
import torch
from torch.utils.data import TensorDataset
from ddp_hpc.train.recipe import Recipe

def build():
    data = TensorDataset(torch.randn(16, 4), torch.randint(0, 2, (16,)))
    return Recipe(model=torch.nn.Linear(4, 2), train_data=data, loss=torch.nn.functional.cross_entropy)
"""
CONFIG = "recipe: {target: 'tiny:build'}\ntrain: {global_batch_size: 8, epochs: 1, record_samples: true}\n"
NOBODY = 65534


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current directory, with a configuration and its recipe in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "tiny.py").write_text(RECIPE)
    return tmp_path


@pytest.fixture(params=[0o000, pytest.param(0o077, marks=pytest.mark.long)], ids=oct)
def _umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def open_to_others(top: Path, bits: int = 0o077) -> list[str]:
    """Return what lies in a directory that others than its owner may use."""
    found = [top, *top.rglob("*")]
    return [
        oct(one.lstat().st_mode) + f" {one}" for one in found if one.lstat().st_mode & bits and not one.is_symlink()
    ]


@pytest.mark.long
@pytest.mark.usefixtures("_umask")
def test_all_of_a_run_is_its_owners_alone_whatever_the_umask(here: Path) -> None:
    argv = [sys.executable, "-m", "ddp_hpc", "submit", "run.yaml", "--wait", "--runs-dir", "a/b/runs"]

    done = subprocess.run(argv, capture_output=True, text=True, check=False)

    run = RunDir(here / "a/b/runs/run")
    assert done.returncode == 0, done.stderr
    assert run.rank_log(0, 0).stat().st_size
    assert len(list(run.checkpoints.glob("*/*"))) >= 2
    assert open_to_others(run.path) == []
    assert open_to_others(here / "a", 0o022) == []  # nor may they rename a run


@pytest.mark.usefixtures("_umask", "_users_part_unchecked")
def test_a_jobs_script_snapshot_and_submitits_folder_are_its_owners_alone(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(capacity, "refuse_node_local_path", lambda _: None)
    monkeypatch.setenv("PATH", f"{here}/bin:/usr/bin:/bin")
    (here / "bin").mkdir()
    answers = {"sbatch": 'echo "Submitted batch job 7"', "scontrol": "true", "sinfo": "true", "squeue": "true"}
    for name, text in answers.items():
        (here / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (here / "bin" / name).chmod(0o755)
    (here / "package").mkdir()
    (here / "package/more.py").touch(0o666)

    main(["submit", "run.yaml", "--cluster", "slurm"])

    run = RunDir(here / "runs/run")
    assert run.submission.exists(), capsys.readouterr()
    assert list(run.submitit.iterdir())
    assert (run.snapshot / "package/more.py").exists()
    assert run.job_script.exists()
    assert open_to_others(run.path) == []


@pytest.mark.usefixtures("_umask")
def test_the_log_that_slurm_makes_by_the_umask_is_closed_when_the_job_begins(here: Path) -> None:
    run = make_run(here)
    run.path.chmod(0o700)
    run.console.parent.mkdir(mode=0o700)
    run.console.touch()

    with signals_held_back():
        supervisor.main([str(run.path), "--cluster", "slurm"])  # there is no job, which is refused

    assert open_to_others(run.console.parent) == []


@pytest.mark.parametrize(
    ("shared", "file", "folder"), [(0o750, 0o640, 0o750), (0o755, 0o644, 0o755), (0o777, 0o644, 0o755)]
)
def test_what_is_made_in_a_directory_may_be_read_by_those_who_may_read_that(
    shared: int, file: int, folder: int, tmp_path: Path
) -> None:
    before = os.umask(0o002)
    top = tmp_path / "run"
    top.mkdir()
    top.chmod(shared)

    make_directories(top / "logs/attempt-0")
    replace_text(top / "logs/attempt-0/progress.json", "{}")

    os.umask(before)
    assert stat.S_IMODE((top / "logs/attempt-0").stat().st_mode) == folder
    assert stat.S_IMODE((top / "logs/attempt-0/progress.json").stat().st_mode) == file


# --- runs of others ----------------------------------------------------------------------------------------------------


def given_away(run: RunDir) -> None:
    os.chown(run.path, NOBODY, NOBODY)


def writable_by(bits: int) -> Callable[[RunDir], None]:
    return lambda run: run.path.chmod(0o700 | bits)


def script_writable(run: RunDir) -> None:
    run.path.chmod(0o755)
    run.job_script.touch()
    run.job_script.chmod(0o666)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        pytest.param(
            given_away,
            "belongs to nobody, and its owner could change",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away"),
        ),
        (writable_by(0o070), "Other users may write to .*digits, .*chmod -R go-w"),
        (writable_by(0o002), "Other users may write to .*digits, .*chmod -R go-w"),
        (script_writable, "Other users may write to .*job.sbatch"),
    ],
    ids=["another's", "the group's", "everybody's", "everybody's script"],
)
def test_a_run_directory_that_others_rule_is_not_gone_on_with(
    change: Callable[[RunDir], None], told: str, tmp_path: Path
) -> None:
    run = make_run(tmp_path)
    before = run.config.read_text()
    change(run)

    with pytest.raises(ConfigError, match=told):
        make_run_dir(run, "name: digits\nseed: 1\n", is_new=False)

    assert run.config.read_text() == before


VERBS_THAT_ACT = ("cancel", "stop", "requeue", "delete --yes", "replay", "audit", "bisect digits", "sweep cancel")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("verb", VERBS_THAT_ACT)
def test_no_verb_that_acts_believes_the_records_of_another_user(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    if verb.startswith("sweep"):
        SweepDir(run.path).ledger.write_text("{}")
    given_away(run)

    code = main([*verb.split(), "digits", "--runs-dir", str(tmp_path)])

    assert code == 2
    assert "belongs to nobody" in capsys.readouterr().err
    assert run.config.exists()


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o2750])
def test_a_run_that_others_may_read_is_gone_on_with(mode: int, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.path.chmod(mode)

    make_run_dir(run, "name: digits\nseed: 1\n", is_new=False)

    assert "seed" in run.config.read_text()
    assert stat.S_IMODE(run.config.stat().st_mode) == 0o600  # it may hold secrets


def test_what_a_later_attempt_writes_of_secrets_is_private_in_a_shared_run(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for folder in (run.path, *(path for path in run.path.rglob("*") if path.is_dir())):
        folder.chmod(0o755)

    write_inputs(run, AttemptInputs(attempt=1, world_size=1, config="env: {HF_TOKEN: s3cr3t}"))
    write_rendezvous_token(run.rendezvous_token(1))

    modes = [stat.S_IMODE(path.stat().st_mode) for path in (run.inputs(1), run.rendezvous_token(1))]
    assert modes == [0o600, 0o600]


def test_where_a_file_system_knows_no_modes_nothing_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path)
    run.path.chmod(0o777)
    everything_open = os.stat_result((0o40777, 0, 0, 0, os.geteuid(), 0, 0, 0, 0, 0))
    monkeypatch.setattr(write_permissions, "_stat_of_probe", lambda _: everything_open)

    make_run_dir(run, "name: digits\nseed: 1\n", is_new=False)

    assert "seed" in run.config.read_text()


def test_a_directory_of_runs_where_everybody_may_rename_them_is_told_of(tmp_path: Path) -> None:
    run = make_run(tmp_path / "all")

    run.path.parent.chmod(0o777)
    told = list(notes_on_writable_parents(run.path))
    run.path.parent.chmod(0o1777)

    assert [f"{tmp_path}/all" in line and "chmod o-w" in line for line in told] == [True]
    assert list(notes_on_writable_parents(run.path)) == []


def test_a_link_that_a_stranger_has_put_beside_a_record_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = tmp_path / "private"
    private.write_text("mine")
    monkeypatch.setattr(os, "urandom", lambda size: b"\0" * size)  # a name that the stranger has guessed
    scratch_path(tmp_path / "STOP").symlink_to(private)

    with pytest.raises(FileExistsError):
        replace_text(tmp_path / "STOP", "theirs")

    assert private.read_text() == "mine"
