"""`submit --dry-run --explain`: the commands behind the job script, by the code that runs them, and without secrets."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from ddp_hpc.cli import main
from ddp_hpc.job.launcher import agents_step_argv
from ddp_hpc.launch.submission.submit_checks import capacity
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import ResourcesSpec, RunSpec, SlurmSpec
from tests.made_launch import launch_of

CONFIG = """
resources: {nodes: 2, workers_per_node: 2}
slurm: {srun_args: [--cpu-bind=none]}
env: {WANDB_API_KEY: "not for others", NCCL_DEBUG: INFO}
"""
DRY = ("submit", "run.yaml", "--cluster", "slurm", "--dry-run")


@pytest.fixture
def here(_users_part_unchecked: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current directory, with a configuration, on a host with Slurm's commands."""
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "squeue", "scontrol", "sacct"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\necho 'Slurmctld(primary) at head is UP'\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "run.yaml").write_text(CONFIG)
    for name in ("torch.sif", "a.sqsh"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(capacity, "refuse_node_local_path", lambda _: None)  # the test's own may be a node's own
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    return tmp_path


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, str]]:
    assert main([*DRY, "--explain", "--json", *words]) == 0
    plan: dict[str, dict[str, str]] = json.loads(capsys.readouterr().out)["plan"]
    return plan


def test_the_explanation_stands_below_the_script_as_comments(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DRY]) == 0
    script = capsys.readouterr().out
    assert main([*DRY, "--explain"]) == 0
    explained = capsys.readouterr().out

    assert explained.startswith(script)
    below = explained[len(script) :].strip().splitlines()
    assert all(line.startswith("# ") for line in below)
    assert any("srun --nodes=2 --ntasks=2" in line for line in below)
    assert any(line.startswith("#   WORLD_SIZE=4  (ddp-hpc: ") for line in below)
    assert any(line.startswith("#   MASTER_PORT is not known yet: ") for line in below)
    assert "#   WANDB_API_KEY: set by the key `env.WANDB_API_KEY`" in below
    assert not any("not for others" in line for line in below)
    subprocess.run(["bash", "-n"], input=explained, text=True, check=True)


def test_the_commands_are_those_of_the_code_that_starts_them(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resources = ResourcesSpec(nodes=2, workers_per_node=2)
    spec = RunSpec(name="run", resources=resources, slurm=SlurmSpec(srun_args=("--cpu-bind=none",)))

    shown = planned(capsys)["steps"]["the workers"]

    assert shlex.split(shown) == agents_step_argv(launch_of(spec, RunDir(here / "runs/run")))


@pytest.mark.parametrize(
    ("words", "there"),
    [
        (("launcher=srun",), ["--ntasks=4", "ddp_hpc.job.node.task", "--meet", "ADDRESS PORT"]),
        (
            ("launcher=torchrun", "torchrun.max_restarts=2"),
            ["ddp_hpc.job.node.torchrun_node", "--meet", "ADDRESS PORT", "--max-restarts=2"],
        ),
        (("container.image=torch.sif",), ["apptainer", "exec", "torch.sif", "python3", "--cpu-bind=none"]),
        (("container.image=a.sqsh", "container.runtime=pyxis"), ["--no-container-mount-home", "python3"]),
    ],
)
def test_launchers_and_images_show_their_own_words(
    words: tuple[str, ...], there: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = planned(capsys, *words)["steps"]["the workers"]

    assert set(there) <= {word.removeprefix(f"{here}/") for word in shlex.split(shown)}
    assert "not for others" not in shown


def test_an_explanation_alone_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "run.yaml", "--explain"]) == 2
    assert "`--explain` works only with `--dry-run`" in capsys.readouterr().err


def test_ranks_and_endpoint_are_the_launchers_whatever_is_set(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "login1")

    assert main([*DRY, "--explain", "env.MASTER_PORT=1234"]) == 0

    explained = capsys.readouterr().out
    assert "MASTER_ADDR is not known yet: " in explained
    assert "MASTER_PORT is not known yet: " in explained


def test_what_is_set_here_reaches_no_worker_of_a_job_without_this_environment(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "77")

    assert main([*DRY, "--explain"]) == 0
    assert "OMP_NUM_THREADS=77" in capsys.readouterr().out
    assert main([*DRY, "--explain", "slurm.extra.export=NONE"]) == 0
    assert "OMP_NUM_THREADS=77" not in capsys.readouterr().out
