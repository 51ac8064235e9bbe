"""Scripts for schedulers that ddp-hpc does not submit to: PBS and Kubeflow Trainer. Rendered and checked, never run there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddp_hpc.cli import main
from ddp_hpc.config import resolve
from ddp_hpc.errors import ConfigError
from ddp_hpc.run_dir.paths import RunDir
from ddp_hpc.spec import RunSpec
from ddp_hpc.submission.elsewhere import pbs_script, train_job

PBS = {
    "name": "digits",
    "runs_dir": "/scratch/runs",
    "resources": {"nodes": 2, "gpus_per_node": 4, "cpus_per_worker": 8, "mem_gb": 200, "time_limit_min": 240},
    "slurm": {"modules": ["cuda/12.4"], "setup": ["ulimit -l unlimited"]},
}
POD = {
    "name": "Digits_2",
    "runs_dir": "/runs",
    "container": {"image": "registry.example.com/me/train:1"},
    "resources": {"nodes": 2, "gpus_per_node": 4},
    "train": {"lr": 0.2},
    "env": {"NCCL_DEBUG": "INFO", "WANDB_API_KEY": "abc"},
}


def spec_of(settings: Mapping[str, Any]) -> RunSpec:
    return resolve(None, {"name": "digits", **settings}, {}, command=()).spec


def pbs(settings: Mapping[str, Any]) -> str:
    spec = spec_of(settings)
    return pbs_script(spec, RunDir(spec.path), Path("/home/ada/my code"), Path("/home/ada/recipes"))


def job(settings: Mapping[str, Any], command: tuple[str, ...] = (), claim: str | None = "shared-runs") -> str:
    return train_job(resolve(None, settings, {}, command=command), claim=claim)


# --- PBS ---------------------------------------------------------------------------------------------------------------


def test_a_job_of_pbs_asks_for_whole_nodes_for_the_time_limit_and_to_be_run_again() -> None:
    lines = pbs(PBS).splitlines()

    assert [line for line in lines if line.startswith("#PBS")] == [
        "#PBS -N digits",
        "#PBS -l select=2:ncpus=32:mpiprocs=1:ngpus=4:mem=200gb",
        "#PBS -l place=scatter",
        "#PBS -l walltime=04:00:00",
        "#PBS -r y",
        "#PBS -j oe",
        "#PBS -o /scratch/runs/digits/logs/console.log",
    ]
    assert "cd '/home/ada/my code' || exit 2" in lines
    assert "ulimit -l unlimited" in lines


@pytest.mark.parametrize("settings", [PBS, {"name": "small", "runs_dir": "/scratch/runs"}])
def test_a_job_script_of_pbs_is_clean_shell(settings: Mapping[str, Any], tmp_path: Path) -> None:
    script = tmp_path / "job.pbs"
    script.write_text(pbs(settings))

    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([shellcheck, "-s", "bash", script], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"container": {"image": "/images/a.sif"}}, ["--target pbs", "`container.image`"]),
        ({"resources": {"gpus_per_node": 1, "gpu_type": "a100"}}, ["`resources.gpu_type`"]),
        ({"launcher": "torchrun", "stage": {"dir": "/local"}}, ["`stage.dir` and `launcher`"]),
        ({"resources": {"time_limit_min": 2}}, ["`resources.time_limit_min` is 2", "120 s"]),
        ({"runs_dir": "/scratch/my runs"}, ["blanks"]),
    ],
)
def test_what_a_script_of_pbs_cannot_do_is_refused(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        pbs({"runs_dir": "/scratch/runs", **settings})

    assert all(word in str(refused.value) for word in words), refused.value


# --- Kubeflow Trainer --------------------------------------------------------------------------------------------------


def test_a_train_job_starts_join_on_each_node_with_the_settings_that_are_no_defaults() -> None:
    trainer = yaml.safe_load(job(POD))["spec"]["trainer"]

    assert trainer["command"] == ["python3", "-m", "ddp_hpc", "join"]
    assert trainer["args"] == ["name=Digits_2", "runs_dir=/runs", "resources.gpus_per_node=4", "train.lr=0.2"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    assert trainer["resourcesPerNode"]["limits"] == {"cpu": "4", "nvidia.com/gpu": "4"}


def test_a_train_job_takes_values_that_may_be_secrets_from_a_secret() -> None:
    text = job(POD)

    secret = {"secretKeyRef": {"name": "digits-2-env", "key": "WANDB_API_KEY"}}
    assert yaml.safe_load(text)["spec"]["trainer"]["env"] == [
        {"name": "NCCL_DEBUG", "value": "INFO"},
        {"name": "WANDB_API_KEY", "valueFrom": secret},
    ]
    assert "abc" not in text
    assert "kubectl create secret generic digits-2-env --from-literal=WANDB_API_KEY=..." in text


def test_the_arguments_of_a_train_job_read_back_as_the_same_configuration() -> None:
    asked = resolve(None, POD, {})

    given = yaml.safe_load(job(POD))["spec"]["trainer"]["args"]
    read = resolve(None, given, {}).spec

    assert (read.name, read.train, read.path) == (asked.spec.name, asked.spec.train, asked.spec.path)


def test_a_train_job_of_a_script_has_its_command_after_two_dashes() -> None:
    args = yaml.safe_load(job(POD, ("python", "train.py", "--lr", "0.1")))["spec"]["trainer"]["args"]

    assert args[-5:] == ["--", "python", "train.py", "--lr", "0.1"]


@pytest.mark.parametrize("settings", [POD, {**POD, "resources": {"nodes": 1, "mem_gb": 8, "cpus_per_worker": 2}}])
def test_the_published_models_of_kubeflow_trainer_take_a_train_job_as_it_is(settings: Mapping[str, Any]) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="`pip install kubeflow-trainer-api`")
    written = yaml.safe_load(job(settings))

    read = models.TrainerV1alpha1TrainJob.from_dict(written)

    assert read.to_dict() == written, "the models drop a field that they do not know"


@pytest.mark.parametrize(
    ("settings", "claim", "words"),
    [
        ({"container": {}}, "runs", ["`container.image` is None"]),
        ({"container": {"image": "/images/a.sif"}}, "runs", ["registry"]),
        ({}, None, ["--claim"]),
        ({"runs_dir": "runs"}, "runs", ["absolute"]),
        ({"slurm": {"modules": ["cuda"]}}, "runs", ["`slurm.modules`"]),
        ({"recipe": {"args": {"token": "abc"}}}, "runs", ["`recipe.args.token` may be a secret"]),
    ],
)
def test_what_a_train_job_cannot_do_is_refused(settings: dict[str, Any], claim: str | None, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        job({**POD, **settings}, claim=claim)

    assert all(word in str(refused.value) for word in words), refused.value


# --- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "digits.yaml"
    path.write_text("recipe: {target: 'ddp_hpc.train.recipes.drill:build'}\n")
    return path


def test_render_writes_the_run_and_says_how_to_start_it_by_qsub(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["render", str(config), "--target", "pbs"]) == 0

    script = config.parent / "runs/digits/job.pbs"
    assert script.read_text().startswith("#!/bin/bash\n#PBS -N digits\n")
    assert f"qsub -q QUEUE -A ACCOUNT {script}" in capsys.readouterr().out


def test_render_prints_a_train_job_and_makes_nothing(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["container.image=a/b:1", "runs_dir=/runs", "--target", "trainjob", "--claim", "runs"]
    assert main(["render", str(config), *words]) == 0

    assert yaml.safe_load(capsys.readouterr().out)["metadata"] == {"name": "digits"}
    assert [path.name for path in config.parent.iterdir()] == ["digits.yaml"]


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--claim", "runs"], "`--claim`"), (["--target", "pbs", "-o", "job.pbs"], "`--output`")],
)
def test_options_that_do_not_belong_to_the_target_are_refused(
    words: list[str], said: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["render", str(config), *words]) == 2

    assert said in capsys.readouterr().err
