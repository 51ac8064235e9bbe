"""Job scripts, byte for byte: a change in one shows in `golden/`, and must be meant."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc import __version__
from ddp_hpc.errors import ConfigError
from ddp_hpc.render import JobScript, quote, quote_for_sbatch, render
from ddp_hpc.run_dir import RunDir
from ddp_hpc.slurm.directives import directives
from ddp_hpc.spec import DataSpec, ResourcesSpec, RunSpec, SlurmSpec, TrainSpec
from tests.made_run import make_run

TRAIN = TrainSpec(global_batch_size=96)
GOLDEN = Path(__file__).parent / "golden"
SPECS = {
    "one_node": RunSpec(name="digits", runs_dir="/scratch/ada/runs"),
    "every_option": RunSpec(
        name="imagenet",
        runs_dir="/scratch/ada/runs",
        data=DataSpec(num_workers=6),
        resources=ResourcesSpec(nodes=4, gpus_per_node=4, gpu_type="a100", mem_gb=200, time_limit_min=240),
        slurm=SlurmSpec(
            partition="gpu",
            account="abc123",
            qos="long",
            constraint="a100&nvlink",
            exclude="node[7-9]",
            nodelist="node[1-4]",
            reservation="maint",
            dependency="afterok:12",
            mail_type="END,FAIL",
            mail_user="ada@example.org",
            comment='it\'s a "test" # %j $HOME \\ `x`; exit',
            requeue=False,
            signal_lead_s=300,
            extra={"switches": 1, "exclusive": True, "spread_job": False, "gpu_bind": "none"},
        ),
    ),
    "setup_and_odd_paths": RunSpec(
        name="odd",
        runs_dir="/scratch/ada's runs/100%",
        slurm=SlurmSpec(modules=("cuda/12.4", "it's"), setup=("ulimit -l unlimited", 'export NCCL_DEBUG="INFO"')),
    ),
}


def script(spec: RunSpec) -> str:
    run = RunDir(Path(spec.runs_dir) / spec.name)
    chdir, code = Path("/scratch/ada/my code"), run.path / "snapshot"
    made = render(
        JobScript(spec=spec, run=run, chdir=chdir, import_paths=[code], python="/scratch/ada/venv/bin/python")
    )
    return made.replace(f"ddp-hpc {__version__}", "ddp-hpc VERSION")


@pytest.mark.parametrize("name", SPECS)
def test_a_script_is_the_golden_one_to_the_byte(name: str) -> None:
    assert script(SPECS[name]) == (GOLDEN / f"{name}.sbatch").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    "check",
    [("bash", "-n"), (str(Path(sys.executable).parent / "shellcheck"), "--shell=bash")],
    ids=["bash", "shellcheck"],
)
def test_golden_scripts_are_sound_shell(name: str, check: tuple[str, ...]) -> None:
    done = subprocess.run([*check, GOLDEN / f"{name}.sbatch"], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("setup", "python", "code", "is_told"),
    [
        ((), "", 0, False),
        (("kill -USR2 $$",), "", 0, True),
        ((), "kill -USR2 $$", 0, False),
        (("kill -TERM $$",), "", -signal.SIGTERM, False),
    ],
    ids=["undisturbed", "told in setup", "told while Python starts", "ended"],
)
def test_a_script_that_is_told_to_leave_goes_on_and_passes_it_on(
    tmp_path: Path, setup: tuple[str, ...], python: str, code: int, *, is_told: bool
) -> None:
    run, interpreter = make_run(tmp_path), tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\n{python}\necho "$@"\n')
    interpreter.chmod(0o755)
    spec = RunSpec(name="digits", runs_dir=str(tmp_path), slurm=SlurmSpec(setup=setup))
    made = render(JobScript(spec=spec, run=run, chdir=tmp_path, import_paths=[], python=str(interpreter)))

    done = subprocess.run(["bash", "-c", made], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout.endswith("--cluster slurm --told\n" if is_told else "--cluster slurm\n" if code == 0 else "")


@pytest.mark.parametrize(("has", "code"), [("cuda/12.4", 0), ("cuda/11.0", 2)])
def test_a_module_that_is_not_there_ends_the_job_with_its_name(has: str, code: int) -> None:
    whole = script(RunSpec(name="x", slurm=SlurmSpec(modules=("cuda/12.4",))))
    modules = whole.partition("ddp-hpc VERSION")[2].partition("\n\n")[2].partition("if ! [[ -r")[0]
    function = f"module() {{ [[ $1 == purge || $2 == {has} ]]; }}"

    done = subprocess.run(["bash", "-c", f"{function}\n{modules}"], capture_output=True, text=True, check=False)

    assert done.returncode == code
    assert ("does not have: cuda/12.4" in done.stderr) is (code == 2)


def test_a_node_without_modules_is_told_apart_from_a_module_that_is_missing() -> None:
    whole = script(RunSpec(name="x", slurm=SlurmSpec(modules=("cuda/12.4",))))
    modules = whole.partition("ddp-hpc VERSION")[2].partition("\n\n")[2].partition("if ! [[ -r")[0]

    done = subprocess.run(
        ["bash", "-c", modules.replace("/etc/profile", "/dev/null")],
        env={},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 2
    assert "has no command module" in done.stderr


@pytest.mark.parametrize(
    "text", ["plain", "two words", "it's", '"', "$HOME", "\\", "`x`", "a;b", "#", "%j", "~", "*", "é"]
)
def test_a_quoted_value_is_one_word_that_the_shell_leaves_alone(text: str) -> None:
    done = subprocess.run(["bash", "-c", f"printf %s {quote(text)}"], capture_output=True, text=True, check=True)

    assert done.stdout == text
    assert shlex.split(quote_for_sbatch(text).replace("\\\\", "\\")) == [text]


@pytest.mark.parametrize("text", ["two\nlines", "nul\0"])
def test_a_value_of_several_lines_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="one line"):
        quote(text)


@pytest.mark.parametrize("key", ["comment", "partition", "mail_user"])
def test_an_option_of_several_lines_is_refused_by_its_key(key: str) -> None:
    with pytest.raises(ConfigError, match=f"slurm.{key}"):
        SlurmSpec(**{key: "a\n#SBATCH --uid=0"})  # type: ignore[arg-type]  # one of many str keys


def test_an_option_that_is_set_twice_is_refused() -> None:
    spec = RunSpec(name="twice", slurm=SlurmSpec(extra={"nodes": 3}))

    with pytest.raises(ConfigError, match=r"slurm\.extra\.nodes"):
        directives(spec, RunDir(spec.path), chdir=Path("/"))


@pytest.mark.parametrize("flag", ["a b", "x;rm", "--nodes", ""])
def test_a_flag_that_is_none_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match="flag of sbatch"):
        SlurmSpec(extra={flag: 1})


@pytest.mark.parametrize(
    ("template", "told"), [("{% for", "line 1"), ("one\n{{ nobody }}\n", "nobody"), (None, "No such file")]
)
def test_a_template_that_cannot_be_filled_is_one_error_with_its_place(
    tmp_path: Path, template: str | None, told: str
) -> None:
    path = tmp_path / "mine.j2"
    if template is not None:
        path.write_text(template)

    with pytest.raises(ConfigError, match=told) as error:
        script(RunSpec(name="own", slurm=SlurmSpec(template=str(path))))

    assert "mine.j2" in str(error.value)


@pytest.mark.parametrize(
    ("resources", "gb"),
    [({}, 2), ({"workers_per_node": 3}, 6), ({"gpus_per_node": 2}, None), ({"mem_gb": 7, "workers_per_node": 3}, 7)],
)
def test_memory_is_asked_for_where_the_clusters_default_would_be_too_little(
    resources: dict[str, Any], gb: int | None
) -> None:
    spec = RunSpec(name="memory", resources=ResourcesSpec(**resources), train=TRAIN)

    made = {one.flag: one.value for one in directives(spec, RunDir(spec.path), chdir=Path("/"))}

    assert made.get("mem") == (None if gb is None else f"{gb}G")
    assert "gpus-per-task" not in made
