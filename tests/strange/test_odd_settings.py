"""Settings that users write and that the authors had not in mind: refused with a reason, or meaning what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cli import main
from ddp_hpc.cluster.slurm.directives import directives
from ddp_hpc.run.config.resolve import load_resolved, render_resolved, resolve, resolve_key
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import ResourcesSpec, RunSpec, SlurmSpec

ADA = {"DDP_HPC_SITE_PROFILE": "", "USER": "ada", "HOME": "/home/ada"}


def options(mem_gb: int | None, /, **extra: Any) -> dict[str, str | None]:
    spec = RunSpec(name="net", resources=ResourcesSpec(mem_gb=mem_gb), slurm=SlurmSpec(extra=extra))
    return directives(spec, RunDir(spec.path), chdir=Path("/home/ada"), cpus_per_worker=spec.cpus_per_task)


@pytest.mark.parametrize("flag", ["mem", "mem_per_cpu", "mem-per-cpu", "mem_per_gpu"])
def test_memory_that_the_user_asks_for_takes_the_place_of_the_automatic_one(flag: str) -> None:
    asked = {name: value for name, value in options(None, **{flag: "3G"}).items() if name.startswith("mem")}

    assert asked == {flag.replace("_", "-"): "3G"}


def test_a_memory_flag_that_is_switched_off_leaves_the_automatic_one() -> None:
    assert options(None, mem_per_cpu=False)["mem"] == "2G"


@pytest.mark.parametrize(
    ("mem_gb", "extra", "named"),
    [
        (4, {"mem_per_cpu": "3G"}, "`resources.mem_gb` and `slurm.extra.mem_per_cpu` are set"),
        (None, {"mem": "1G", "mem-per-gpu": "3G"}, "`slurm.extra.mem` and `slurm.extra.mem_per_gpu` are set"),
    ],
)
def test_two_amounts_of_memory_are_refused_before_sbatch_does(mem_gb: int | None, extra: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=f"{named}, but sbatch takes one amount"):
        options(mem_gb, **extra)


def test_a_type_of_gpu_without_gpus_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`resources.gpu_type` is 'a100', but `resources.gpus_per_node` is 0"):
        ResourcesSpec(gpu_type="a100")


@pytest.mark.parametrize("how", [(), ("--dry-run",)], ids=["wet", "dry"])
def test_several_nodes_on_this_machine_are_refused(
    how: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("resources: {nodes: 2}\n")

    assert main(["submit", "run.yaml", "--cluster", "local", *how]) == 2
    assert "`resources.nodes` is 2, but the run would start on this machine only" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "override", "variable", "found"),
    [
        ("runs_dir: /scratch/$USER/runs", "", "", "/scratch/ada/runs"),
        ("", "runs_dir=${HOME}/runs", "", "/home/ada/runs"),
        ("", "runs_dir=~/runs", "", "/home/ada/runs"),
        ("", "runs_dir=~", "", "/home/ada"),
        ("", "", "$USER.runs", "ada.runs"),
        ("", "runs_dir=/odd$$name/~", "", "/odd$name/~"),
        ("runs_dir: $NOT_SET_HERE", "runs_dir=/won", "", "/won"),
    ],
)
def test_variables_in_a_runs_own_paths_are_filled_in(
    text: str, override: str, variable: str, found: str, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(text)
    environ = {**ADA, **({"DDP_HPC__RUNS_DIR": variable} if variable else {})}

    made = resolve(tmp_path / "run.yaml", [override] if override else [], environ)

    assert made.spec.runs_dir == found
    (tmp_path / "config.yaml").write_text(render_resolved(made))
    assert load_resolved(tmp_path / "config.yaml").runs_dir == found, "what is filled in stays as it is"
    if variable:
        assert resolve_key("runs_dir", environ) == found


def test_images_and_binds_are_filled_in_and_what_the_job_reads_is_left_to_it(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("env: {CACHE: $USER}\nslurm: {setup: ['echo $HOME']}\nstage: {dir: $TMPDIR}\n")

    made = resolve(tmp_path / "run.yaml", ["container.image=~/a.sif", "container.binds=[$HOME/x:/x, ~/y:/y]"], ADA).spec

    assert (made.container.image, made.container.binds) == ("/home/ada/a.sif", ("/home/ada/x:/x", "/home/ada/y:/y"))
    assert (made.env["CACHE"], made.slurm.setup, made.stage.dir) == ("$USER", ("echo $HOME",), "$TMPDIR")


@pytest.mark.parametrize(
    ("word", "told"),
    [
        (
            "runs_dir=$NOWHERE/runs",
            r"`runs_dir` is '\$NOWHERE/runs' \(the command line\), but the environment variable NOWHERE is not",
        ),
        ("runs_dir=/a$", r"a `\$` must be followed by a variable's name. Write `\$\$` for"),
    ],
)
def test_a_variable_that_is_not_set_makes_no_directory_of_its_name(word: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("")

    with pytest.raises(ConfigError, match=told):
        resolve(tmp_path / "run.yaml", [word], ADA)


def test_a_directory_named_by_an_option_is_taken_as_the_shell_left_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ada")
    (tmp_path / "run.yaml").write_text("")

    assert main(["submit", "run.yaml", "--cluster", "local", "--dry-run", "--runs-dir=~/odd$name"]) == 0
    assert "runs_dir: /home/ada/odd$name " in capsys.readouterr().out


@pytest.mark.parametrize("word", ["runs_dir={}/file", "runs_dir={}/file/below", "name=file"])
def test_a_file_where_runs_would_be_is_named_with_the_key(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("runs_dir: .")
    (tmp_path / "file").write_text("kept")

    assert main(["submit", "run.yaml", "--cluster", "local", word.format(tmp_path)]) == 2

    told = capsys.readouterr().err
    assert f"but {tmp_path}/file is a file, not a directory" in told
    assert "`runs_dir=...`" in told
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["submit", "run.yaml", "--dry-run", "runs_dir=~nosuchuser/runs"], "no user 'nosuchuser'"),
        (["submit", "run.yaml", "--dry-run", "container.image=~nosuchuser/i.sif"], "no user 'nosuchuser'"),
        (["render", "run.yaml", "slurm.template=~nosuchuser/t.j2"], "~nosuchuser/t.j2"),
        (["submit", "run.yaml", "--dry-run", "--site", "~nosuchuser/s.yaml"], "~nosuchuser/s.yaml"),
        (["list", "--runs-dir=~nosuchuser/x"], "~nosuchuser/x"),
        (["container", "build", "i.sif", "--base=~nosuchuser/b.sif"], "no user 'nosuchuser'"),
    ],
)
def test_the_home_of_an_unknown_user_is_named_and_ends_in_no_traceback(
    words: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("name: one\n")

    assert main(words) == (0 if words[0] == "list" else 2)
    out, err = capsys.readouterr()
    assert named in out + err


def test_a_word_that_no_file_can_have_as_its_name_is_said_to_be_no_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    assert main(["submit", "a" * 300, "--dry-run"]) == 2

    assert "The configuration file 'aaa" in capsys.readouterr().err
