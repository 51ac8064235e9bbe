"""From a run to the words that put its workers into an image, runtime by runtime."""

from __future__ import annotations

import platform
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cluster import containers
from ddp_hpc.cluster.containers import (
    Bind,
    CommandWrapper,
    HostPaths,
    command_wrapper,
    container_setup,
    identity_of,
    is_address,
    missing_sources,
    sif_architecture,
)
from ddp_hpc.job.launcher import STEP_ARGV_BY_LAUNCHER, agent_argv, agents_step_argv
from ddp_hpc.job.staging import job_command_wrapper
from ddp_hpc.job.wire.endpoint import Endpoint
from ddp_hpc.launch.submission.submit_checks.image import image_notes
from ddp_hpc.run.run_dir.ledger import record_start
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import ContainerSpec, RecipeSpec, ResourcesSpec, RunSpec, TrainSpec
from ddp_hpc.run.workload.table import workload_of
from tests.made_launch import launch_of, paths_of
from tests.made_run import make_run

RUN = RunDir(Path("/scratch/ada/runs/net"))
WORK_DIR = Path("/home/ada/project")
CODE = "/scratch/ada/runs/net/snapshot"
HERE = HostPaths(work_dir=Path("/"))


def spec(**container: Any) -> RunSpec:
    known = {"image": "/images/torch.sif", **container}
    return RunSpec(name="net", container=ContainerSpec(**known), resources=ResourcesSpec(nodes=2, gpus_per_node=4))


def inside(monkeypatch: pytest.MonkeyPatch, one: RunSpec | None = None) -> containers.ContainerSetup:
    monkeypatch.setattr(containers, "PACKAGE_DIR", Path("/venv/lib/python3.11/site-packages/ddp_hpc"))
    found = container_setup(one or spec(), RUN, paths_of(one or spec(), WORK_DIR, (CODE,)))
    assert found is not None
    return found


VALUES = {"_DDP_HPC_INSIDE_PYTHONPATH": "/opt/ddp_hpc", "_DDP_HPC_INSIDE_PYTHONNOUSERSITE": "1"}
SCRIPT = (
    'export PYTHONPATH="$_DDP_HPC_INSIDE_PYTHONPATH"; export PYTHONNOUSERSITE="$_DDP_HPC_INSIDE_PYTHONNOUSERSITE"; '
    'unset _DDP_HPC_INSIDE_PYTHONPATH _DDP_HPC_INSIDE_PYTHONNOUSERSITE; exec "$@"'
)
ENV = ["sh", "-c", SCRIPT, "sh"]
MOUNTS = [
    "type=bind,source=/venv/lib/python3.11/site-packages/ddp_hpc,destination=/opt/ddp_hpc/ddp_hpc,ro",
    "type=bind,source=/datasets,destination=/data,ro",
    "type=bind,source=/home/ada/project,destination=/home/ada/project",
    "type=bind,source=/scratch/ada/runs/net,destination=/scratch/ada/runs/net",
]
PYXIS_MOUNTS = (
    "/venv/lib/python3.11/site-packages/ddp_hpc:/opt/ddp_hpc/ddp_hpc:ro,/datasets:/data:ro,"
    "/home/ada/project:/home/ada/project,/scratch/ada/runs/net:/scratch/ada/runs/net"
)
GOLDEN: dict[str, tuple[list[str], list[str]]] = {
    program: (
        [],
        [
            *(program, "exec", "--nv"),
            *(word for mount in MOUNTS for word in ("--mount", mount)),
            *("--pwd", "/home/ada/project", "--writable-tmpfs", "/images/torch.sif"),
            *ENV,
        ],
    )
    for program in ("apptainer", "singularity")
}
GOLDEN["pyxis"] = (
    [
        "--container-image=/images/torch.sif",
        f"--container-mounts={PYXIS_MOUNTS}",
        "--container-workdir=/home/ada/project",
        "--no-container-mount-home",
        "--writable-tmpfs",
    ],
    ENV,
)
GOLDEN["docker"] = (
    [],
    [
        *("docker", "run", "--rm", "--interactive", "--init", "--no-healthcheck", "--gpus=all"),
        *("--network=host", "--ipc=host", "--pid=host", "--ulimit=memlock=-1", "--user=1000:100"),
        *("--group-add=44", "--group-add=992", "--env=HOME=/tmp"),
        *(word for mount in MOUNTS for word in ("--mount", mount.replace(",ro", ",readonly"))),
        *(
            "--env=MASTER_ADDR",
            "--env=NCCL_DEBUG",
            *(f"--env={name}" for name in VALUES),
            "--workdir=/home/ada/project",
            "--writable-tmpfs",
        ),
        "/images/torch.sif",
        *ENV,
    ],
)
PYXIS_OPTIONS = (
    *("image", "mounts", "workdir", "name", "save", "mount-home", "no-mount-home", "remap-root", "no-remap-root"),
    *("entrypoint", "no-entrypoint", "entrypoint-log", "writable", "readonly", "env"),
)
"""What follows `--container-` in the help that the pyxis plugin adds to srun's (0.20; `--no-container-...` for some)."""


def test_pyxis_is_asked_by_options_that_it_documents() -> None:
    ours = [word.partition("=")[0] for word in GOLDEN["pyxis"][0] if "container" in word]
    documented = {
        f"--no-container-{name.removeprefix('no-')}" if name.startswith("no-") else f"--container-{name}"
        for name in PYXIS_OPTIONS
    }

    assert len(ours) == 4
    assert set(ours) <= documented


@pytest.mark.parametrize("runtime", GOLDEN)
def test_a_command_line_is_the_golden_one(monkeypatch: pytest.MonkeyPatch, runtime: Any) -> None:
    one = spec(binds=("/datasets:/data:ro",), options=("--writable-tmpfs",))
    found = replace(
        inside(monkeypatch, one),
        passed=("HOME", "MASTER_ADDR", "NCCL_DEBUG", "PYTHONPATH"),
        user="1000:100",
        groups=(44, 992),
    )

    wrapper = command_wrapper(found, runtime, "python3")

    assert (list(wrapper.srun_args), list(wrapper.prefix)) == GOLDEN[runtime]
    assert (wrapper.python, wrapper.environ) == ("python3", VALUES)


@pytest.mark.parametrize(("runtime", "is_for_slurm"), [("docker", True), ("pyxis", False)])
def test_a_runtime_that_is_for_elsewhere_is_refused_before_the_queue_and_in_the_job(
    runtime: str, is_for_slurm: bool
) -> None:
    one = spec(runtime=runtime, image="docker://torch:1")

    with pytest.raises(ConfigError, match=f"is {runtime}"):
        list(image_notes(one, RUN, [], {}, is_for_slurm=is_for_slurm))
    with pytest.raises(ConfigError, match=f"is {runtime}"):
        job_command_wrapper(one, RUN, paths_of(one), {}, is_for_slurm=is_for_slurm)


def test_dockers_images_are_names_even_where_a_file_is_called_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    one = spec(runtime="docker", image="torch:1")

    found = container_setup(one, RUN, paths_of(one, WORK_DIR), {"A": "1"})

    assert found is not None
    assert (found.image, found.passed) == ("torch:1", ("A",))


def test_the_runs_own_variables_are_set_inside_over_the_images(monkeypatch: pytest.MonkeyPatch) -> None:
    found = inside(monkeypatch, replace(spec(), env={"LD_LIBRARY_PATH": "/opt/ofi", "N": 3, "gone": None}))

    assert dict(found.environ) == {
        "LD_LIBRARY_PATH": "/opt/ofi",
        "N": "3",
        "PYTHONPATH": "/opt/ddp_hpc",
        "PYTHONNOUSERSITE": "1",
    }


@pytest.mark.parametrize("launcher", ["agent", "srun", "torchrun"])
def test_python_alone_goes_inside_and_srun_stays_outside(launcher: str) -> None:
    wrapper = CommandWrapper(python="/opt/python", prefix=("runtime", "image"), srun_args=("--of-the-runtime",))
    launch = launch_of(spec(), RUN, wrapper)
    endpoint = Endpoint("10.0.0.1", 29500)

    argv = agents_step_argv(launch) if launcher == "agent" else STEP_ARGV_BY_LAUNCHER[launcher](launch, 0, endpoint)

    at = argv.index("--of-the-runtime")
    assert argv[0] == "srun"
    assert argv[at + 1 : at + 5] == ["runtime", "image", "/opt/python", "-m"]
    assert sys.executable not in argv


def test_without_an_image_everything_is_as_it_was() -> None:
    bare = RunSpec(name="net")

    assert container_setup(bare, RUN, paths_of(bare, WORK_DIR)) is None
    assert job_command_wrapper(bare, RUN, paths_of(bare), {}) == containers.BARE
    assert agent_argv(launch_of(bare, RUN))[0] == sys.executable


@pytest.mark.parametrize(
    ("gpus", "asked", "flags"),
    [("auto", 4, ["--nv"]), ("auto", 0, []), ("rocm", 4, ["--rocm"]), ("nvidia", 0, ["--nv"]), ("none", 4, [])],
)
def test_the_driver_comes_in_where_gpus_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, gpus: Any, asked: int, flags: list[str]
) -> None:
    one = replace(spec(gpus=gpus), resources=ResourcesSpec(gpus_per_node=asked))

    words = command_wrapper(inside(monkeypatch, one), "apptainer", "python3").prefix

    assert [word for word in words if word in {"--nv", "--rocm"}] == flags


def test_data_that_the_recipe_names_is_seen_inside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    args = {"root": str(tmp_path), "weights": str(tmp_path / "none"), "shells": "/bin/sh", "width": 3, "name": "x"}

    found = inside(monkeypatch, replace(spec(), recipe=RecipeSpec(target="net:build", args=args)))

    assert Bind(str(tmp_path), str(tmp_path)) in found.binds
    assert not any(bind.source.startswith(("/bin", f"{tmp_path}/none")) for bind in found.binds)


@pytest.mark.parametrize("form", ["file", "relative", "run", "checkpoint"])
def test_the_weights_to_begin_with_are_seen_inside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: str) -> None:
    runs, work_dir = tmp_path / "runs", tmp_path / "project"
    work_dir.mkdir()
    other = make_run(runs, "pretrained")
    (tmp_path / "weights.pt").touch()
    texts = {
        "file": (str(tmp_path / "weights.pt"), tmp_path / "weights.pt"),
        "relative": ("../weights.pt", tmp_path / "weights.pt"),
        "run": ("pretrained", other.path),
        "checkpoint": (str(other.checkpoints), other.checkpoints),
    }
    other.checkpoints.mkdir()
    text, place = texts[form]
    one = replace(spec(), runs_dir=str(runs), train=TrainSpec(init_from=text))
    monkeypatch.setattr(containers, "PACKAGE_DIR", Path("/venv/lib/python3.11/site-packages/ddp_hpc"))

    found = container_setup(one, RunDir(one.path), paths_of(one, work_dir))

    assert found is not None
    assert Bind(str(place), str(place)) in found.binds


def test_both_places_that_may_hold_the_weights_are_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker takes the run, as the folder of its name holds no weights."""
    runs, work_dir = tmp_path / "runs", tmp_path / "work"
    (work_dir / "pretrained").mkdir(parents=True)
    make_run(runs, "pretrained")
    one = replace(spec(), runs_dir=str(runs), train=TrainSpec(init_from="pretrained"))
    monkeypatch.setattr(containers, "PACKAGE_DIR", Path("/venv/lib/python3.11/site-packages/ddp_hpc"))

    found = container_setup(one, RunDir(one.path), paths_of(one, work_dir))

    assert found is not None
    assert {str(runs / "pretrained"), str(work_dir)} <= {bind.source for bind in found.binds}


def test_weights_below_the_home_of_nobody_end_in_no_traceback(tmp_path: Path) -> None:
    one = replace(spec(), runs_dir=str(tmp_path), train=TrainSpec(init_from="~nosuchuser/w.pt"))

    found = [*workload_of(one).input_paths(tmp_path / "work")]

    assert found == [tmp_path / "work/~nosuchuser/w.pt", tmp_path / "~nosuchuser/w.pt"]


def test_weights_that_are_not_there_are_the_workers_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    found = inside(monkeypatch, replace(spec(), train=TrainSpec(init_from="/nowhere/weights.pt")))

    assert not any("nowhere" in bind.source for bind in found.binds)


def test_what_lies_in_a_bound_path_is_not_bound_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = inside(monkeypatch, spec(binds=("/scratch", "/home/ada:/home/ada:ro")))

    assert [bind.source for bind in found.binds][1:] == ["/scratch", "/home/ada"]


@pytest.mark.parametrize("text", ["data", "/a:b", "/a:/b:rx", "/a:/b:ro:ro", ""])
def test_a_bind_that_is_none_is_told_with_the_form(text: str) -> None:
    with pytest.raises(ConfigError, match=r"a bind must be `/SOURCE`, `/SOURCE:/TARGET`"):
        Bind.parse(text)


@pytest.mark.parametrize(
    ("image", "is_one"),
    [
        ("docker://pytorch/pytorch", True),
        ("nvcr.io#nvidia/pytorch:24.07-py3", True),
        ("/a#b.sif", False),
        ("x.sif", False),
    ],
)
def test_addresses_are_told_from_paths(image: str, is_one: bool) -> None:
    assert is_address(image) is is_one


@pytest.mark.parametrize("path", ["/a,b", "/a:b"])
def test_a_path_that_pyxis_would_misread_is_refused(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    found = replace(inside(monkeypatch), binds=(Bind(path, path),))

    with pytest.raises(ConfigError, match="pyxis cannot mount"):
        command_wrapper(found, "pyxis", "python3")


# --- looked at before it is used -------------------------------------------------------------------------------------


def looked(one: RunSpec, environ: dict[str, str] | None = None) -> list[str]:
    return list(
        image_notes(one, RUN, [Path(CODE)], {"PATH": "/usr/bin"} if environ is None else environ, is_for_slurm=True)
    )


def test_an_image_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`container.image` is .*none.sif, but there is no such file"):
        looked(spec(image=str(tmp_path / "none.sif")))


def test_a_bind_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`container.binds` has /no/such, but there is no such file"):
        looked(spec(image=str(tmp_path), binds=("/no/such:/data",)))


def test_an_address_is_fetched_once_and_not_by_every_node() -> None:
    with pytest.raises(ConfigError, match=r"apptainer pull image.sif docker://pytorch/pytorch"):
        looked(spec(image="docker://pytorch/pytorch"))
    assert not any("pull" in note for note in looked(spec(image="docker://pytorch/pytorch", runtime="pyxis")))


def test_a_login_node_without_the_runtime_is_told_of(tmp_path: Path) -> None:
    assert any(
        "this host has no apptainer or singularity on its PATH" in note for note in looked(spec(image=str(tmp_path)))
    )
    program = tmp_path / "singularity"
    program.touch(0o755)
    assert looked(spec(image=str(tmp_path)), {"PATH": str(tmp_path)}) == []


def made_sif(path: Path, *, code: bytes = b"02", number: int = 1) -> Path:
    """Write the header of an image file."""
    start = b"#!/usr/bin/env run-singularity\n".ljust(32, b"\0")
    path.write_bytes(start + b"SIF_MAGIC\0" + b"01\0" + code + b"\0" + number.to_bytes(16, "big") + b"\0" * 40)
    return path


@pytest.mark.parametrize(("code", "name"), [(b"02", "x86_64"), (b"04", "aarch64"), (b"99", None)])
def test_an_image_for_another_machine_is_told_of(tmp_path: Path, code: bytes, name: str | None) -> None:
    image = made_sif(tmp_path / "image.sif", code=code)

    assert sif_architecture(image) == name
    told = [note for note in looked(spec(image=str(image))) if "it runs only if" in note]
    assert bool(told) == (name is not None and name != platform.machine())


def test_a_file_that_is_no_sif_says_nothing_of_its_machine(tmp_path: Path) -> None:
    (tmp_path / "image.sqsh").write_bytes(b"hsqs")

    assert sif_architecture(tmp_path / "image.sqsh") is None


def test_a_resume_in_another_image_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "apptainer").touch(0o755)
    environ = {"PATH": str(tmp_path)}
    run, image = make_run(tmp_path), made_sif(tmp_path / "image.sif", number=1)
    first = job_command_wrapper(spec(image=str(image)), run, HERE, environ)
    record_start(run, attempt=0, job_id="7", image=first.image)
    assert list(image_notes(spec(image=str(image)), run, [], environ, is_for_slurm=True)) == []

    made_sif(image, number=2)
    told = list(image_notes(spec(image=str(image)), run, [], environ, is_for_slurm=True))
    capsys.readouterr()
    job_command_wrapper(spec(image=str(image)), run, HERE, environ)

    assert "attempt 0 ran in another image (SIF 0" in told[0]
    assert told[0] in capsys.readouterr().err


def test_a_directory_can_change_unseen(tmp_path: Path) -> None:
    assert identity_of(str(tmp_path)) == ""
    assert identity_of("docker://pytorch/pytorch") == "docker://pytorch/pytorch"


# --- on the job's first node -----------------------------------------------------------------------------------------


def test_a_job_takes_the_runtime_that_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "singularity").touch(0o755)
    run = RunDir(tmp_path)

    found = job_command_wrapper(spec(image=str(tmp_path)), run, HERE, {"PATH": str(tmp_path)})

    assert found.prefix[0] == "singularity"
    assert f"the workers run in the image {tmp_path}, started by singularity" in capsys.readouterr().err


def test_a_job_without_the_runtime_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"needs apptainer or singularity, .* Load its module \(in a job, with `slurm.modules`\)"
    ):
        job_command_wrapper(spec(image=str(tmp_path)), RunDir(tmp_path), HERE, {"PATH": str(tmp_path)})


def test_a_node_that_does_not_see_the_image_or_a_path_says_which(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.sif, but there is no such file or directory on this node"):
        job_command_wrapper(spec(image=str(tmp_path / "none.sif")), RunDir(tmp_path), HERE, {})
    with pytest.raises(ConfigError, match=r"The container has to mount /no/such, but this node has no such path"):
        job_command_wrapper(spec(image=str(tmp_path), binds=("/no/such",)), RunDir(tmp_path), HERE, {})


def test_what_is_missing_is_known_before_a_runtime_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = replace(inside(monkeypatch), binds=(Bind("/no/such", "/a"), Bind(str(tmp_path), "/b")))

    assert missing_sources(found) == ["/no/such"]
