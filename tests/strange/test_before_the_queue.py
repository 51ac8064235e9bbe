"""What a job would fail of on its nodes is refused where it is typed, by a dry run too."""

from __future__ import annotations

import faulthandler
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import psutil
import pytest
import torch

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cli import main
from ddp_hpc.job.node import check_users_part
from ddp_hpc.job.script.source import early_imports
from ddp_hpc.launch.submission import local
from ddp_hpc.launch.submission.run_dir_setup import refuse_torchrun_per_worker
from ddp_hpc.launch.submission.submit_checks import capacity, users_part
from ddp_hpc.run.config.resolve import load_resolved
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import ResourcesSpec, RunSpec, ScriptSpec
from ddp_hpc.train.recipe import check_args
from ddp_hpc.watch.status import read_status

HOME_RUN = Path("/home/ada/runs/net")


def mounted(monkeypatch: pytest.MonkeyPatch, **mounts: str) -> None:
    found = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in mounts.items()]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: found)


@pytest.mark.parametrize(
    ("python", "mounts", "told"),
    [
        ("/tmp/venv", {"/": "ext4"}, "/tmp of its own"),
        ("/var/tmp/ada/venv", {"/": "ext4"}, "/var/tmp of its own"),
        ("/dev/shm/venv", {"/": "ext4", "/dev/shm": "tmpfs"}, r"/dev/shm \(tmpfs\) of its own"),
        ("/fast/venv", {"/": "ext4", "/fast": "tmpfs"}, r"/fast \(tmpfs\) of its own"),
        ("/tmp/shared/venv", {"/": "ext4", "/tmp": "tmpfs", "/tmp/shared": "nfs4"}, ""),
        ("/home/ada/venv", {"/": "ext4", "/home": "nfs4"}, ""),
        ("/usr", {"/": "tmpfs", "/home": "nfs4"}, ""),  # a node without a disk
    ],
)
def test_a_python_that_nodes_do_not_share_is_refused(
    python: str, mounts: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted(monkeypatch, **mounts)
    wanted = pytest.raises(ConfigError, match=rf"This Python uses {python}, but each node has a {told}")

    with wanted if told else nullcontext():
        capacity.refuse_node_local_path(HOME_RUN, [Path("/usr/lib"), Path(python)])


def on_login_node(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a directory of a user's, on a host with commands of Slurm that accept everything."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(capacity, "refuse_node_local_path", lambda _: None)
    monkeypatch.setenv("PATH", f"{folder}/bin:/usr/bin:/bin")
    (folder / "bin").mkdir()
    for name in ("sbatch", "scontrol", "squeue", "srun"):
        (folder / "bin" / name).write_text("#!/bin/sh\n")
        (folder / "bin" / name).chmod(0o755)


NET = "import torch\n\ndef build(width: int = 8, root: str | None = None, *, norm: Literal['batch', 'layer'] = 'batch') -> Recipe:\n    raise SystemExit('the recipe was built on the login node')\n"
FILES = {
    "run.yaml": "recipe: {target: 'net:build'}\n",
    "net.py": f"from typing import Literal\nfrom ddp_hpc import Recipe\n{NET}",
    "pair.py": "def build() -> tuple[int, int]: ...\n",
    "train.py": "",
    "needing.py": "def build(root): ...\n",
    "circle.py": "from layers import Block\n\ndef norm(): ...\n",
    "layers.py": "from circle import norm\n\nclass Block: ...\n",
    "unready.py": "import json, torch\nfrom nettt import Net\ntry:\n    import apex\nexcept ImportError:\n    pass\n",
    "own_path.py": "import sys\nsys.path.append('lib')\nimport beside\n",
    "main.sh": "#!/bin/bash\necho 1\n",
    "of_windows.sh": "#!/bin/bash\r\necho 1\r\n",
    "of_laptop.py": "#!/Users/ada/miniconda/bin/python\n",
    "pkg/__init__.py": "raise RuntimeError('imported')\n",
    "pkg/train.py": "",
    "weights.pt": "",
    "broken.py": "def build(:\n",
    "lacking.py": "import not_there\n",
    "of_gpus.py": "raise RuntimeError('no GPU here')\n",
    "slow.py": "import time\ntime.sleep(60)\n",
    "dying.py": "import os\nos.abort()\n",
    "data/keep": "",
    "runs/first/config.yaml": "",
}
SBATCH = """#!/bin/sh
for script; do :; done
if grep -q qos=hihg "$script"; then echo 'sbatch: error: Invalid qos specification' >&2; exit 1; fi
[ $1 = --test-only ] || echo 7
"""
"""Knows the quality `hihg` not; takes everything else."""
UNCHECKED = "note: only the job can check this: "
MISTAKES = {
    "a wrong module": ("run.yaml recipe.target=nett:build", "No module named 'nett'. Did you mean 'net'?"),
    "a wrong function": ("run.yaml recipe.target=net:biuld", "no function 'biuld'. Did you mean 'build'?"),
    "no function": ("run.yaml recipe.target=net", "no built-in recipe of that name"),
    "a wrong built-in": ("run.yaml recipe.target=dril", "Did you mean 'drill'?"),
    "a wrong argument": ("run.yaml recipe.args.widht=3", "unexpected keyword argument 'widht'. Did you mean 'width'?"),
    "an argument of a built-in": ("run.yaml recipe.target=image_classification recipe.args.modle=x", "'model'"),
    "a syntax error": ("run.yaml recipe.target=broken:build", "raised SyntaxError"),
    "a package that is missing": ("run.yaml recipe.target=lacking:build", "No module named 'not_there'"),
    "one that the job's modules may have": (
        "run.yaml recipe.target=lacking:build slurm.modules=[torch]",
        f"{UNCHECKED}`slurm.modules` may give the job another Python",
    ),
    "one that the image may have": (
        "run.yaml recipe.target=lacking:build container.image=data",
        f"{UNCHECKED}`container.image` may give the job another Python",
    ),
    "a wrong function, whatever the modules": (
        "run.yaml recipe.target=net:biuld slurm.modules=[torch]",
        "no function 'biuld'",
    ),
    "an import that needs a GPU": ("run.yaml recipe.target=of_gpus:build", f"{UNCHECKED}a node may have"),
    "an import that ends Python": (
        "run.yaml recipe.target=dying:build",
        f"{UNCHECKED}the import of the user's code ended",
    ),
    "an import that takes long": (
        "run.yaml recipe.target=slow:build",
        f"{UNCHECKED}the user's code was not imported within",
    ),
    "weights that are not there": ("run.yaml train.init_from=none.pt", "nor the run"),
    "weights of a run without any": ("run.yaml train.init_from=first", "has no checkpoint yet"),
    "weights that another job makes": (
        "run.yaml train.init_from=first slurm.dependency=afterok:7",
        f"{UNCHECKED}a job that this one waits for",
    ),
    "weights on a disk of the nodes": (
        "run.yaml train.init_from=/nodes-only/none.pt",
        f"{UNCHECKED}this host has no /nodes-only",
    ),
    "a wrong script": ("-- python trainn.py", "Did you mean 'train.py'?"),
    "a script elsewhere": ("-- python src/train.py", "src/train.py does not exist"),
    "a script where setup goes": (
        "slurm.setup=['cd src'] -- python sub.py",
        f"{UNCHECKED}`slurm.setup` changes the directory",
    ),
    "a script in the image": (
        "container.image=data -- python /app/train.py",
        f"{UNCHECKED}`container.image` may have it",
    ),
    "a directory as a script": ("-- python data", "is a directory without a `__main__.py`"),
    "a wrong module as a script": ("-- python -m trian", "names the module 'trian'"),
    "a file that is not executable": ("-- ./train.py", "not an executable file"),
    "a wrong program": ("-- pyhton train.py", f"{UNCHECKED}a node may have a program"),
    "a wrong module to preload": ("script.preload=[nunpy] -- python train.py", "names the module 'nunpy'"),
    "a dot for the colon": (
        "run.yaml recipe.target=net.build",
        "Name your own function as `module:function`: `net:build`.",
    ),
    "a file for the module": (
        "run.yaml recipe.target=net.py:build",
        "No module named 'net.py'; 'net' is not a package. Did you mean 'net'?",
    ),
    "a text for a number": (
        "run.yaml recipe.args.width=wide",
        "`recipe.args.width` is 'wide', but `net:build` takes int there.",
    ),
    "a word that is no choice": (
        "run.yaml recipe.args.norm=bacth",
        "`recipe.args.norm` is 'bacth', but `net:build` takes",
    ),
    "a function of no recipe": (
        "run.yaml recipe.target=pair:build",
        "`pair:build` says that it returns tuple, but must return a",
    ),
    "a metric that no recipe may have": (
        "run.yaml checkpoint.keep_best=1 checkpoint.best_metric=acuracy checkpoint.best_is=highest",
        f"{UNCHECKED}only the job knows the recipe's metrics, so `checkpoint.best_metric` ('acuracy') may be none of them",
    ),
    "an argument that is missing": ("run.yaml recipe.target=needing:build", "missing a required argument: 'root'"),
    "data that a laptop has": (
        "run.yaml recipe.args.root=/Users/ada/cifar",
        f"{UNCHECKED}`recipe.args.root` is '/Users/ada/cifar', and this host has no such file or directory",
    ),
    "data that nobody has": ("run.yaml recipe.args.root=data/imges", f"{UNCHECKED}`recipe.args.root` is 'data/imges'"),
    "no data in the directory": (
        "run.yaml recipe.args.root=data/empty",
        f"{UNCHECKED}`recipe.args.root` is 'data/empty', and this host has no file in that directory",
    ),
    "modules in a circle": ("run.yaml recipe.target=circle:build", "most likely due to a circular import"),
    "weights that may be another model's": (
        "run.yaml train.init_from=weights.pt",
        f"{UNCHECKED}only the job builds the model, so the weights of `train.init_from` may not fit it",
    ),
    "batches that do not divide": (
        "run.yaml resources.workers_per_node=4 train.global_batch_size=10 train.micro_batch_size=3",
        "need a multiple of 12",
    ),
    "another tool's precision": ("run.yaml train.precision=bf16-mixed", "must be one of fp32, bf16, fp16"),
    "a time as Slurm writes it": ("run.yaml resources.time_limit_min=4:00:00", "must be a whole number"),
    "more than the cluster has": ("slurm.qos=hihg -- python train.py", "`slurm.qos` 'hihg'"),
    "a file of the shell that is missing": (
        "'slurm.setup=[source ~/envs/torch/bin/activate]' -- python train.py",
        f"{UNCHECKED}`slurm.setup` reads ~/envs/torch/bin/activate, which this host does not have",
    ),
    "a script that Python cannot read": ("-- python broken.py", "Python cannot read its line 1"),
    "a script's package that is missing": (
        "-- python unready.py",
        "whose line 2 imports 'nettt', but this Python has no module of that name. Did you mean 'net'?",
    ),
    "a script's package that the image may have": (
        "container.image=data -- python unready.py",
        f"{UNCHECKED}`container.image` may give the job another Python",
    ),
    "another Python that is missing": ("-- python3.1 train.py", "PATH has no such program. Name `python`, which is"),
    "a script without its right to run": ("-- ./main.sh", "Make it executable with `chmod +x`"),
    "a script from Windows": (
        "-- ./of_windows.sh",
        "whose lines end as on Windows, so Linux finds no program '/bin/bash\\r'",
    ),
    "a script from a laptop": (
        "-- ./of_laptop.py",
        "names the program '/Users/ada/miniconda/bin/python', which does not exist",
    ),
    "a wrong module of a package": (
        "-- python -m pkg.trian",
        "names the module 'pkg.trian', but this Python has none of that name. Did you mean 'pkg.train'?",
    ),
    "a wrong function in one point of a sweep": (
        "run.yaml --sweep seed=1,2 --sweep recipe.target=net:build,net:biuld",
        "no function 'biuld'",
    ),
    "a wrong key": ("run.yaml trian.lr=1", "train.lr"),
    "a wrong value": ("run.yaml train.epochs=many", "train.epochs"),
    "an array": ("slurm.extra.array=1-3 -- python train.py", "use `ddp-hpc submit --sweep`"),
    "a command of sbatch": (
        "slurm.extra.wrap=hostname -- python train.py",
        "`slurm.extra.wrap` would make something else",
    ),
    "several jobs in one": (
        "slurm.extra.hetjob=true -- python train.py",
        "`slurm.extra.hetjob` would make something else",
    ),
    "torchrun in each worker": (
        "resources.workers_per_node=2 -- torchrun --nproc-per-node=2 train.py",
        "torchrun of its own",
    ),
    "torchruns that meet": (
        "resources.workers_per_node=2 -- torchrun --nnodes=2 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_endpoint=node1:29400 train.py",
        "torchrun of its own",
    ),
    "the same as a module": (
        "resources.workers_per_node=2 -- python -m torch.distributed.run train.py",
        "torchrun of its own",
    ),
    "no file": ("runn.yaml", "runn.yaml"),
}
"""What is typed after `submit`, and what is said."""


class Forked:
    """A fork of this process, which has imported PyTorch, in the place of a new Python that would import it for two seconds."""

    code: int | None = None

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str], **_: object) -> None:
        self.pid = os.fork()
        if self.pid:
            return
        try:
            os.setsid()
            faulthandler.disable()  # pytest's, which would tell of a crash on this terminal
            for number in range(3):
                os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.environ.clear()
            os.environ.update(env)
            for name in FILES:  # other tests have modules of these names
                sys.modules.pop(name.partition(".")[0].partition("/")[0], None)
            check_users_part.main(*argv[3:])
        finally:
            os._exit(0)

    def wait(self, timeout: float = 60.0) -> int:
        deadline = time.monotonic() + timeout
        while self.code is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("check", timeout)
            time.sleep(0.005)
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if ended else None
        return self.code


@pytest.mark.parametrize("how", [["--dry-run"], pytest.param([], marks=pytest.mark.long)], ids=["dry run", "submit"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_before_the_queue_or_said_to_be_unchecked(
    mistake: str, how: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed, told = MISTAKES[mistake]
    on_login_node(tmp_path, monkeypatch)
    is_forked = bool(how) and mistake != "a wrong function"  # the others get a new Python where they are submitted
    if is_forked:
        monkeypatch.setattr(users_part, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": Forked}))
    monkeypatch.setattr(users_part, "DEADLINE_S", 4.0 if mistake == "an import that takes long" else 60.0)
    (tmp_path / "bin/sbatch").write_text(SBATCH)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "data/empty").mkdir()
    for name in ("of_windows.sh", "of_laptop.py"):
        (tmp_path / name).chmod(0o755)

    code = main(["submit", "--cluster=slurm", "name=net", *how, *shlex.split(typed)])

    said = capsys.readouterr()
    assert told in f"{said.out}{said.err}"
    assert code == (0 if UNCHECKED in told else 2)
    assert (tmp_path / "runs/net").exists() == (UNCHECKED in told and not how)


@pytest.mark.parametrize("cluster", ["slurm", "local"])
def test_a_program_to_notify_with_that_this_host_lacks_is_named(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_login_node(tmp_path, monkeypatch)
    (tmp_path / "train.py").touch()
    for program in ("mial", "sh"):
        words = [
            "--dry-run",
            f"--cluster={cluster}",
            f"notify.command=[{program}, me]",
            "--",
            sys.executable,
            "train.py",
        ]
        assert main(["submit", *words]) == 0

    assert capsys.readouterr().err.count("`notify.command` starts 'mial', and this host has no such program") == 1


@pytest.mark.parametrize("cluster", ["slurm", "local"])
@pytest.mark.parametrize("how", [["submit", "--dry-run"], ["submit"], ["render"]], ids=" ".join)
def test_an_image_that_is_not_there_is_refused_by_all_alike(
    how: list[str], cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_login_node(tmp_path, monkeypatch)
    (tmp_path / "run.yaml").write_text("container: {image: none.sif}\n")
    where = [] if how == ["render"] else ["--cluster", cluster]

    code = main([*how, "run.yaml", *where])

    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    assert f"`container.image` is {tmp_path}/none.sif, but there is no such file" in said.err
    assert not (tmp_path / "runs").exists()


def test_a_script_that_hydra_gives_another_directory_at_each_start_is_told_so_before_it_starts_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_login_node(tmp_path, monkeypatch)
    (tmp_path / "bin/sbatch").write_text(SBATCH)
    monkeypatch.setattr(users_part, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": Forked}))
    (tmp_path / "train.py").write_text("import hydra\n\n\n@hydra.main(version_base=None)\ndef main(cfg): ...\n")
    (tmp_path / "short.py").write_text("from hydra import main\n\n\n@main(version_base=None)\ndef run(cfg): ...\n")
    (tmp_path / "plain.py").write_text("import hydra  # not @hydra.main\n")
    (tmp_path / "hydra.py").write_text("def main(**kwargs): return lambda function: function\n")

    def said(*words: str) -> str:
        assert main(["submit", "--cluster=slurm", "name=net", "--dry-run", "--", "python", *words]) == 0
        return capsys.readouterr().err

    assert all("add `hydra.run.dir=out/NAME`" in said(name, "lr=0.1") for name in ("train.py", "short.py"))
    assert "Hydra" not in said("train.py", "hydra.run.dir=out/net")
    assert "Hydra" not in said("plain.py")


@pytest.mark.parametrize(("pattern", "is_told"), [("runs/train/*/last.pt", True), ("out/last.pt", False)])
def test_a_script_that_saves_beside_itself_among_the_runs_is_told_where_its_files_land(
    pattern: str, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(capacity, "refuse_node_local_path", lambda _: None)
    (tmp_path / "train.py").write_text("")

    assert main(["render", "name=yolo", f"script.progress={pattern}", "--", "python", "train.py"]) == 0

    said = capsys.readouterr()
    assert ("inside `runs_dir`" in f"{said.out}{said.err}") is is_told
    assert (tmp_path / pattern.partition("/*")[0].removesuffix("/last.pt")).is_dir()


@pytest.mark.long
def test_without_a_snapshot_the_job_imports_the_code_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(capacity, "refuse_node_local_path", lambda _: None)
    (tmp_path / "net.py").write_text("def build(): ...")
    (tmp_path / "run.yaml").write_text("recipe: {target: 'net:build'}\n")

    scripts = {}
    for is_enabled in ("true", "false"):
        words = [f"snapshot.enabled={is_enabled}", f"name=net-{is_enabled}"]
        assert main(["render", "run.yaml", *words]) == 0
        scripts[is_enabled] = (tmp_path / f"runs/net-{is_enabled}/job.sbatch").read_text()

    assert f"_DDP_HPC_IMPORT_PATH={tmp_path}/runs/net-true/snapshot " in scripts["true"]
    assert (tmp_path / "runs/net-true/snapshot/net.py").is_file()
    assert f"_DDP_HPC_IMPORT_PATH={tmp_path} " in scripts["false"]
    assert sorted(path.name for path in (tmp_path / "runs/net-false").iterdir()) == [
        "config.yaml",
        "job.sbatch",
        "logs",
        "submission.lock",
    ]


TRAINED = """
import torch
from ddp_hpc.train.recipe import Recipe

def build(width: int = 1):
    data = torch.utils.data.TensorDataset(torch.ones(8, 4), torch.ones(8, width))
    return Recipe(model=torch.nn.Linear(4, width), train_data=data, loss=torch.nn.functional.mse_loss)
"""


@pytest.mark.long
def test_a_refused_change_leaves_the_run_as_it_was_and_an_earlier_command_line_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_login_node(tmp_path, monkeypatch)
    (tmp_path / "net.py").write_text(TRAINED)
    (tmp_path / "run.yaml").write_text("recipe: {target: 'net:build'}\ntrain: {epochs: 9, global_batch_size: 8}\n")
    submit = ["submit", "run.yaml", "--cluster=local", "--wait"]
    assert main([*submit, "train.epochs=2", "seed=7"]) == 0
    run, before = RunDir(tmp_path / "runs/run"), (tmp_path / "runs/run/config.yaml").read_text()

    for change in ("recipe.args.width=3", "optimizer.name=adamw"):
        assert main([*submit, "train.epochs=3", change]) == 2
        assert "The run run is as it was." in capsys.readouterr().err
        assert run.config.read_text() == before
        assert read_status(run, now=time.time()).state == "finished"
    assert main([*submit[:2], "--cluster=slurm", "--dry-run", "train.epochs=3", "optimizer.name=adamw"]) == 2
    assert "The checkpoint's optimizer is SGD, but this run's is AdamW" in capsys.readouterr().err
    assert main([*submit[:2], "--cluster=slurm", "--dry-run", "train.epochs=3", "recipe.args.width=3"]) == 0
    assert f"{UNCHECKED}`recipe` has changed since step 2, and only the job builds the model" in capsys.readouterr().err

    assert main(submit) == 0
    said = capsys.readouterr()
    assert "has finished already" in said.out
    assert "keeps what an earlier command line has set: `seed=7`, `train.epochs=2`; a value" in said.err
    assert main([*submit, "train.epochs=3"]) == 0
    assert load_resolved(run.config).seed == 7
    assert load_resolved(run.config).train.epochs == 3


def test_a_run_that_slurm_refuses_to_continue_keeps_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_login_node(tmp_path, monkeypatch)
    (tmp_path / "train.py").touch()
    words = ["submit", "name=net", "--cluster=slurm"]
    (tmp_path / "bin/sbatch").write_text("#!/bin/sh\n[ $1 = --test-only ] || echo 7\n")
    assert main([*words, "--", "python", "train.py"]) == 0
    files = [tmp_path / "runs/net" / name for name in ("config.yaml", "job.sbatch")]
    before = [path.read_text() for path in files]
    (tmp_path / "bin/scontrol").write_text(
        "#!/bin/sh\ncase \"$*\" in *'show job'*) echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1; esac\n"
    )
    (tmp_path / "bin/sbatch").write_text("#!/bin/sh\necho 'sbatch: error: Invalid qos specification' >&2; exit 1\n")

    assert main([*words, "slurm.qos=none", "--", "python", "train.py"]) == 2

    assert "Invalid qos" in capsys.readouterr().err
    assert [path.read_text() for path in files] == before


def test_more_workers_than_a_machine_can_bear_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_login_node(tmp_path, monkeypatch)
    (tmp_path / "train.py").touch()
    workers = local.MOST_WORKERS * len(os.sched_getaffinity(0))

    code = main(["submit", "--cluster=local", f"resources.workers_per_node={workers}", "--", "python", "train.py"])

    assert code == 2
    assert f"`resources.workers_per_node` is {workers}, but this machine has" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_submission_from_within_a_job_says_how_to_use_that_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_login_node(tmp_path, monkeypatch)
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    (tmp_path / "train.py").touch()

    code = main(["submit", "--cluster=slurm", "--dry-run", "--", "python", "train.py"])

    assert code == 0
    assert "To use the nodes of job 41 instead: `srun ddp-hpc join`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("nodes", "workers", "command"),
    [
        (1, 1, "torchrun --nproc-per-node=2 train.py"),
        (2, 1, "torchrun --nnodes=2 --rdzv-endpoint=here:29400 train.py"),
        (1, 2, "python train.py"),
    ],
)
def test_torchrun_as_the_one_worker_of_a_node_is_taken(nodes: int, workers: int, command: str) -> None:
    script, resources = ScriptSpec(command=tuple(command.split())), ResourcesSpec(nodes=nodes, workers_per_node=workers)
    refuse_torchrun_per_worker(RunSpec(name="net", script=script, resources=resources))


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (b"\xef\xbb\xbfimport none_a\r\n", ["none_a"]),
        (b"# -*- coding: latin-1 -*-\nname = '\xe9'\nfrom none_a.part import one\n", ["none_a"]),
        (b'"""What."""\nfrom __future__ import annotations\nfrom . import one\nimport none_a as a, none_b\n', ["__future__", "none_a", "none_b"]),
        (b"if True:\n    import none_a\ntry:\n    import none_b\nexcept ImportError:\n    none_b = None\n", []),
        (b"import os\nos.system('pip install none_a')\nimport none_a\n", ["os"]),
        (b"try:\n    import none_a\nexcept ImportError:\n    install()\nimport none_b\n", []),
        (b"def main():\n    print(1)\n\nimport none_a\n", ["none_a"]),
    ],
)  # fmt: skip
def test_of_a_script_the_imports_before_its_first_call_are_certain(source: bytes, names: list[str]) -> None:
    assert [name for _, name in early_imports(source)] == names


def annotated(
    *,
    number: int = 1,
    rate: float = 1.0,
    maybe: int | None = None,
    text: str = "",
    choice: Literal["a", "b"] = "a",
    several: list[int] = [],  # noqa: B006
    place: Path = HOME_RUN,
    **others: object,
) -> None:
    del number, rate, maybe, text, choice, several, place, others


@pytest.mark.parametrize(
    ("name", "value", "is_taken"),
    [
        *[("number", 3, True), ("number", 3.0, True), ("number", None, True), ("number", "3", False), ("number", [3], False)],
        *[("rate", 1, True), ("rate", "1e-3", False), ("maybe", "x", False), ("maybe", None, True)],
        *[("text", 3, True), ("text", ["x"], False), ("choice", "b", True), ("choice", "c", False)],
        *[("several", "1", True), ("place", "/data", True), ("new", "x", True)],
    ],
)  # fmt: skip
def test_an_argument_is_refused_where_it_is_surely_not_what_the_annotation_asks_for(
    name: str, value: object, is_taken: bool
) -> None:
    with nullcontext() if is_taken else pytest.raises(ConfigError, match=rf"`recipe.args.{name}` is .*takes .* there"):
        check_args("net:build", annotated, {name: value})  # type: ignore[arg-type]


def test_an_annotation_may_be_any_object_and_a_choice_is_shown_with_its_words() -> None:
    def build(shape: object = None, choice: Literal["a", "b"] = "a") -> None:
        del shape, choice

    build.__annotations__ = {"shape": torch.ones(2), "choice": Literal["a", "b"]}

    check_args("net:build", build, {"shape": [1, 2]})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"is 'c', but `net:build` takes Literal\['a', 'b'\] there"):
        check_args("net:build", build, {"choice": "c"})  # type: ignore[arg-type]
