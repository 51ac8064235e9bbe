"""Values that are secrets: no command line, log or display shows them, and workers get them byte by byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cli import main
from ddp_hpc.cluster.containers import Bind, ContainerSetup, command_wrapper
from ddp_hpc.cluster.rendezvous.worker_env import (
    CPUS_BEFORE,
    GIVEN_VARIABLE,
    PROBE_FOLDER,
    TABLE_VARIABLE,
    USERS_CODE,
)
from ddp_hpc.job.supervisor import _set_variables
from ddp_hpc.run.config.resolve import load_resolved
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.software_versions import environment_here

HOSTILE = "s3cr3t $(id) `id` $HOME \"quoted\" 'too' \\n\nsecond line"
RECIPE = """
import json, os, psutil, torch
from torch.utils.data import TensorDataset
from ddp_hpc.train.recipe import Recipe

def build(where):
    seen = [psutil.Process(), *psutil.Process().parents()]
    lines = [word for one in seen for word in one.cmdline()]
    with open(where, "w") as file:
        json.dump({"environ": dict(os.environ), "lines": lines}, file)
    data = TensorDataset(torch.randn(8, 4), torch.randint(0, 2, (8,)))
    return Recipe(model=torch.nn.Linear(4, 2), train_data=data, loss=torch.nn.functional.cross_entropy)
"""
RUNTIME = """#!{python}
# Records how it is called, and becomes the command that would run in the image.
import json, os, sys
words, name = sys.argv[1:], os.path.basename(sys.argv[0])
with open({record!r}, "w") as file:
    json.dump([name, *words], file)
environ = dict(os.environ)
if name == "docker":  # which passes on what it is told to pass, and no more
    names = [word.removeprefix("--env=") for word in words if word.startswith("--env=")]
    environ = {{one: os.environ[one] for one in names if "=" not in one}}
    environ |= dict(one.split("=", 1) for one in names if "=" in one)
environ["API_KEY"] = "the image's own"
command = words[words.index({image!r}) + 1 :]
os.execvpe(command[0], command, environ)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current directory, with a configuration that holds a secret, and its recipe."""
    monkeypatch.chdir(tmp_path)
    config = {
        "recipe": {"target": "tiny:build", "args": {"where": str(tmp_path / "seen.json")}},
        "train": {"global_batch_size": 8, "epochs": 1},
        "env": {"API_KEY": HOSTILE, "NCCL_DEBUG": "WARN"},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    (tmp_path / "tiny.py").write_text(RECIPE)
    return tmp_path


def runtime(here: Path, name: str, image: str) -> Path:
    """Put a stand-in for a container runtime on PATH; return where it writes how it was called."""
    record, program = here / "called.json", here / "bin" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text(RUNTIME.format(python=sys.executable, record=str(record), image=image))
    program.chmod(0o755)
    return record


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param("singularity", marks=pytest.mark.long), "docker"])
def test_a_secret_reaches_workers_in_an_image_and_stands_on_no_command_line_and_in_no_log(
    name: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = "torch:1" if name == "docker" else str(here / "image.sif")
    (here / "image.sif").touch()
    record = runtime(here, name, image)
    monkeypatch.setenv("PATH", f"{here / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", "/somewhere/of/the/hosts")
    words = [f"container.image={image}", f"container.runtime={name}", f"container.python={sys.executable}"]
    options = "container.options=['--of-mine=a b']"

    argv = [sys.executable, "-m", "ddp_hpc", "submit", "run.yaml", "--wait", *words, options]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)

    run = RunDir(here / "runs/run")
    assert done.returncode == 0, done.stderr + run.console.read_text()
    seen, called = json.loads((here / "seen.json").read_text()), json.loads(record.read_text())
    assert seen["environ"]["API_KEY"] == HOSTILE
    carried = {variable for variable in seen["environ"] if variable.startswith("_DDP_HPC")}
    assert carried == {TABLE_VARIABLE, USERS_CODE, PROBE_FOLDER, GIVEN_VARIABLE, CPUS_BEFORE}
    assert "s3cr3t" not in seen["environ"][TABLE_VARIABLE]
    assert set(seen["environ"]["PYTHONPATH"].split(":")) == {str(here), "/opt/ddp_hpc"}  # nothing else of the host's
    assert "s3cr3t" not in json.dumps([called, seen["lines"]])
    assert "--of-mine=a b" in called[: called.index(image)]
    assert "s3cr3t" not in run.console.read_text() + done.stdout + done.stderr
    assert "API_KEY is set by the key `env.API_KEY`" in run.console.read_text()
    assert "NCCL_DEBUG='WARN' is set by the key `env.NCCL_DEBUG`" in run.console.read_text()
    assert load_resolved(run.config).environ["API_KEY"] == HOSTILE


@pytest.mark.parametrize("name", ["apptainer", "singularity", "pyxis", "docker"])
def test_no_runtimes_words_hold_a_value(name: Any) -> None:
    values = {"API_KEY": HOSTILE, "LD_LIBRARY_PATH": "/s3cr3t/too", "UID": "s3cr3t", "PYTHONPATH": "/opt/ddp_hpc"}
    inside = ContainerSetup(
        image="/i.sif", binds=(Bind("/a", "/b"),), environ=values, work_dir="/w", passed=("API_KEY",)
    )

    wrapper = command_wrapper(inside, name, sys.executable)
    shell = [*wrapper.prefix[wrapper.prefix.index("sh") :], sys.executable]
    argv = [*shell, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
    done = subprocess.run(argv, env={"PATH": os.environ["PATH"], **wrapper.environ}, capture_output=True, check=True)

    assert "s3cr3t" not in " ".join([*wrapper.prefix, *wrapper.srun_args])
    found = json.loads(done.stdout)
    assert values.items() <= found.items()
    assert not any(variable.startswith("_DDP_HPC") for variable in found)


@pytest.mark.parametrize("word", ["--cleanenv", "-e", "--containall", "-C"])
def test_a_word_that_keeps_the_environment_out_is_refused(word: str) -> None:
    inside = ContainerSetup(image="/i.sif", binds=(), environ={}, work_dir="/w", options=("--fakeroot", word))

    with pytest.raises(ConfigError, match=f"`container.options` has '{word}'"):
        command_wrapper(inside, "apptainer", "python3")


def test_displays_name_a_secret_and_its_source_without_its_value(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["recipe.args.hf_token=hf_s3cr3t", "recipe.args.num_tokens=12", "env.PIN=5309"]

    assert main(["submit", "run.yaml", "--dry-run", *words]) == 0
    text = capsys.readouterr().out
    assert main(["submit", "run.yaml", "--dry-run", "--json", *words]) == 0
    values = json.loads(capsys.readouterr().out)["config"]

    assert "s3cr3t" not in text + str(values)
    assert "5309" not in text + str(values)
    assert "# env.API_KEY: (not shown)  # file run.yaml" in text
    assert values["env.API_KEY"] == {"value": "(not shown)", "source": "file run.yaml"}
    assert (values["recipe.args.num_tokens"]["value"], values["env.NCCL_DEBUG"]["value"]) == (12, "WARN")
    (here / "again.yaml").write_text(text)
    assert load_resolved(here / "again.yaml").environ == {"NCCL_DEBUG": "WARN"}


def test_the_log_does_not_show_what_a_variable_was_either(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_BASE", "s3cr3t")
    monkeypatch.setenv("OMP_PROC_BIND", "false")

    _set_variables({"WANDB_BASE": "s3cr3t too", "OMP_PROC_BIND": "close"})

    told = capsys.readouterr().err
    assert "s3cr3t" not in told
    assert "OMP_PROC_BIND='close' is set by the key `env.OMP_PROC_BIND` (it was 'false')" in told
    assert "TORCH_HUB_TOKEN" not in environment_here({"TORCH_HUB_TOKEN": "s3cr3t", "OMP_NUM_THREADS": "2"}).variables
