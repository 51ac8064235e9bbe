"""Keys that are handed on: from the configuration to the script and the commands, so that none is ignored on the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_hpc.job.launcher import STEP_ARGV_BY_LAUNCHER, agents_step_argv
from ddp_hpc.job.wire.endpoint import Endpoint
from ddp_hpc.launch.render import render
from ddp_hpc.run.config.resolve import resolve
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import RunSpec
from tests.made_launch import launch_of


def made_of(tmp_path: Path, *words: str) -> RunSpec:
    (tmp_path / "run.yaml").write_text("")
    return resolve(tmp_path / "run.yaml", words, {"DDP_HPC_SITE_PROFILE": ""}).spec


def script(spec: RunSpec) -> list[str]:
    return render(spec, RunDir(spec.path), chdir=Path("/home/ada")).splitlines()


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("slurm.constraint=fast", "#SBATCH --constraint=fast"),
        ("slurm.extra.reservation=maint", "#SBATCH --reservation=maint"),
        ("slurm.dependency=afterany:7", "#SBATCH --dependency=afterany:7"),
        ("slurm.extra.mail_type=END,FAIL", "#SBATCH --mail-type=END,FAIL"),
        ("slurm.extra.mail_user=ada@example.org", "#SBATCH --mail-user=ada@example.org"),
    ],
)
def test_a_key_of_slurm_is_a_line_of_the_script_and_no_line_without_it(word: str, line: str, tmp_path: Path) -> None:
    assert line in script(made_of(tmp_path, word))
    assert not any(one.startswith(line.partition("=")[0]) for one in script(made_of(tmp_path)))


def test_a_template_of_ones_own_is_the_script(tmp_path: Path) -> None:
    (tmp_path / "mine.j2").write_text("#!/bin/sh\n# {{ name }}, mine\n")

    assert script(made_of(tmp_path, f"slurm.template={tmp_path}/mine.j2")) == ["#!/bin/sh", "# run, mine"]


@pytest.mark.parametrize("launcher", ["agent", *STEP_ARGV_BY_LAUNCHER])
def test_arguments_of_srun_reach_the_step_of_every_launcher(launcher: str, tmp_path: Path) -> None:
    spec = made_of(tmp_path, "slurm.srun_args=[--cpu-bind=none, --mpi=none]", f"launcher={launcher}")
    launch = launch_of(spec)

    endpoint = Endpoint("10.0.0.1", 29500)
    argv = agents_step_argv(launch) if launcher == "agent" else STEP_ARGV_BY_LAUNCHER[launcher](launch, 0, endpoint)

    assert argv[argv.index("--cpu-bind=none") + 1] == "--mpi=none"


@pytest.mark.parametrize("count", [0, 4])
def test_restarts_of_torchrun_are_what_the_key_says(count: int, tmp_path: Path) -> None:
    spec = made_of(tmp_path, f"torchrun.max_restarts={count}", "launcher=torchrun")

    assert f"--max-restarts={count}" in STEP_ARGV_BY_LAUNCHER["torchrun"](
        launch_of(spec), 0, Endpoint("10.0.0.1", 29500)
    )
