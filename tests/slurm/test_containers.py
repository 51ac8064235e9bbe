"""The same run inside a real Apptainer, on the cluster, as its ordinary user."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.cluster.containers import Bind, CommandWrapper, ContainerSetup, command_wrapper, identity_of
from ddp_hpc.run.run_dir.ledger import Ledger
from tests.slurm import apptainer
from tests.slurm.apptainer import PYTHON_INSIDE, Apptainer, NoApptainerError
from tests.slurm.cluster import USER, Cluster
from tests.slurm.faulty_runs import (
    FAULTY,
    MAY_LOSE,
    RECIPE,
    assert_unbroken,
    await_done,
    await_first_end,
    await_step,
    slow_file,
)
from tests.slurm.lab.settings import ROOT
from tests.slurm.runs import SMALL, LoginNode, world


@pytest.fixture(scope="session")
def program() -> Apptainer:
    if os.environ.get("DDP_HPC_SLURM_ROOTFS"):
        pytest.skip("not tested in containers: the images take their programs from a /usr that these nodes have not")
    try:
        return apptainer.get()
    except NoApptainerError as error:
        pytest.skip(f"not tested in containers: {error}")


@pytest.fixture(scope="session")
def images(program: Apptainer, cluster: Cluster) -> dict[str, Path]:
    """Return an image of each kind, where all nodes see it."""
    folder = cluster.shared / "images"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    sandbox = program.make_sandbox(folder / "sandbox")
    return {"sandbox": sandbox, "sif": program.make_sif(sandbox, folder / "image.sif")}


def housed(program: Apptainer, image: Path) -> list[str]:
    """Return the settings that put a run into an image."""
    setup = f"slurm.setup=['export PATH={program.bin_dir}:$PATH APPTAINER_UNSQUASH=1']"  # as `module load` would
    return [setup, f"container.image={image}", f"container.python={PYTHON_INSIDE}", f"container.binds={program.binds}"]


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param("sandbox", marks=pytest.mark.campaign), "sif"])
def test_a_run_in_an_image_is_preempted_and_comes_to_the_bits_of_one_in_none(
    cluster: Cluster, login: LoginNode, program: Apptainer, images: dict[str, Path], kind: str
) -> None:
    """By a recipe of the user's own, which the image has never seen."""
    login.add_recipe(RECIPE)
    slow = slow_file(login)
    asked = [*FAULTY, *world(2, 2), "slurm.partition=low", "slurm.nodelist=node[1-2]", f"recipe.args.slow_while={slow}"]
    login.submit("housed", *asked, *housed(program, images[kind]))
    await_step(login, "housed")

    rival = ["--partition=high", "--nodelist=node[1-2]", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
    cluster.run("sbatch", *rival)
    await_first_end(login, "housed")
    slow.unlink()
    await_done(login, "housed")

    first, second = Ledger.read(login.run("housed")).attempts
    assert (first.cause, first.next, second.first_step) == ("preempted", "requeue", first.last_step)
    assert f"the workers run in the image {images[kind]}, started by apptainer" in login.console("housed")
    assert second.image == first.image == identity_of(str(images[kind]))
    assert_unbroken(login, "housed", world_size=4)


@pytest.mark.long
def test_a_users_script_runs_in_an_image(login: LoginNode, program: Apptainer, images: dict[str, Path]) -> None:
    login.add_recipe(ROOT / "tests" / "distributed" / "scripts" / "multinode.py")
    keys = [*world(2, 1), "script.progress=snapshot.pt", *housed(program, images["sandbox"])]

    done = login.type("submit", "--cluster", "slurm", "--wait", *keys, "--", "python", "multinode.py", "2")

    assert done.returncode == 0, done.stdout + done.stderr + login.console("multinode")
    assert "[RANK 1] Epoch 1" in login.run("multinode").rank_log(0, 1).read_text()
    assert f"the workers run in the image {images['sandbox']}" in login.console("multinode")
    assert "saved" in done.stdout


@pytest.mark.campaign
def test_every_launcher_trains_in_an_image(login: LoginNode, program: Apptainer, images: dict[str, Path]) -> None:
    login.submit("bare", *SMALL, *world(2, 2), "resources.cpus_per_worker=1", "--wait")

    for launcher in ("agent", "srun", "torchrun"):
        asked = [*SMALL, *world(2, 2), "resources.cpus_per_worker=1", f"launcher={launcher}"]
        login.submit(launcher, *asked, *housed(program, images["sandbox"]), "--wait")
        assert login.digest(launcher) == login.digest("bare")


@pytest.mark.campaign
def test_workers_in_an_image_start_again_in_place(
    cluster: Cluster, login: LoginNode, program: Apptainer, images: dict[str, Path]
) -> None:
    login.add_recipe(RECIPE)
    once = ("recipe.args.raises_at=100", f"recipe.args.once={login.folder}/raised")

    login.submit("once", *FAULTY, *world(2, 2), *once, *housed(program, images["sandbox"]), "--wait")

    first, second = Ledger.read(login.run("once")).attempts
    assert (first.cause, first.next, second.pid) == ("worker crashed", "in place", first.pid)
    assert_unbroken(login, "once", world_size=4, may_lose=MAY_LOSE)


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["agent", pytest.param("srun", marks=pytest.mark.campaign)])
def test_an_image_on_the_nodes_own_disks_is_used_there_and_taken_away(
    cluster: Cluster, login: LoginNode, program: Apptainer, images: dict[str, Path], launcher: str
) -> None:
    local = login.folder / "local"
    small = [*SMALL, *world(2, 1), "resources.cpus_per_worker=1"]  # so many threads by each launcher
    login.submit("shared", *small, "--wait")
    asked = [*small, f"launcher={launcher}", f"stage.dir={local}"]

    login.submit("staged", *asked, *housed(program, images["sif"]), "--wait")

    said = login.console("staged")
    assert f"copied {images['sif']}" in said
    assert f"to {local}/ddp_hpc-" in said
    assert login.digest("staged") == login.digest("shared")
    cluster.wait_for(lambda: not list(local.iterdir()), 60)


@pytest.mark.long
def test_a_packed_environment_is_unpacked_on_each_node_and_runs_the_workers(cluster: Cluster, login: LoginNode) -> None:
    """A small one: its Python and its packages are links."""
    root = login.folder / "env"
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    packages = Path(sysconfig.get_path("purelib"))
    inside = root / packages.relative_to(sys.prefix)
    inside.parent.mkdir(parents=True)
    inside.symlink_to(packages)
    (root / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    archive = login.folder / "env.tar.gz"
    subprocess.run(["tar", "-czf", archive, "-C", root, "."], check=True)
    local = login.folder / "local"
    login.submit("shared", *SMALL, *world(2, 1), "--wait")

    login.submit("packed", *SMALL, *world(2, 1), f"stage.dir={local}", f"stage.archive={archive}", "--wait")

    assert f"copied {archive}" in login.console("packed")
    assert login.digest("packed") == login.digest("shared")
    cluster.wait_for(lambda: not list(local.iterdir()), 60)


# --- whatever a path or a value is made of -----------------------------------------------------------------------------

NUM_VALUES, NUM_PATHS, PATHS_A_CALL = 300, 200, 20
PIECES = [
    *"$`\\\"'!#&;|<>(){}[]*?~^%@=+,:. \t\n\u00e9\u4e16",
    "$(id)",
    "`id`",
    "${HOME}",
    "$HOME",
    "\\n",
    "%s",
    "--env",
    "a",
    "b",
]
TELL = "import json, os, sys; json.dump([{k: v for k, v in os.environ.items()}, os.getcwd(), [open(p + '/x').read() for p in sys.argv[1:]]], sys.stdout)"


def hostile(chance: random.Random, *, but_for: str = "") -> str:
    pieces = [piece for piece in PIECES if not set(piece) & set(but_for)]
    return "".join(chance.choices(pieces, k=chance.randint(1, 12)))


def run_inside(wrapper: CommandWrapper, code: str, *args: str, environ: dict[str, str]) -> Any:
    """Run Python inside as an ordinary user, on this machine."""
    user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--init-groups"]
    argv = [*user, *wrapper.command, "-c", code, *args]
    done = subprocess.run(argv, env={**environ, **wrapper.environ}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def house_here(program: Apptainer, images: dict[str, Path]) -> Callable[..., CommandWrapper]:
    """Return how Python is run in the sandbox with binds, as the supervisor would have it."""

    def make(binds: Sequence[Bind], *, environ: dict[str, str], work_dir: str) -> CommandWrapper:
        needed = [Bind.parse(text) for text in program.binds.strip("[]").split(", ")]
        inside = ContainerSetup(
            image=str(images["sandbox"]),
            binds=(*needed, *binds),
            environ=environ,
            work_dir=work_dir,
            options=("--no-home",),
        )
        wrapper = command_wrapper(inside, "apptainer", PYTHON_INSIDE)
        return replace(wrapper, prefix=(str(program.program), *wrapper.prefix[1:]))

    return make


@pytest.mark.long
def test_hostile_values_arrive_byte_for_byte(house_here: Callable[..., CommandWrapper], shared_dir: Path) -> None:
    chance = random.Random(0)
    values = {f"VALUE_{number}": hostile(chance) for number in range(NUM_VALUES)}
    through, set_inside = dict(list(values.items())[: NUM_VALUES // 2]), dict(list(values.items())[NUM_VALUES // 2 :])
    wrapper = house_here([], environ=set_inside, work_dir=str(shared_dir))

    found, where, _ = run_inside(wrapper, TELL, environ={"PATH": "/usr/bin:/bin", **through})

    assert {name: found.get(name) for name in values} == values
    assert where == str(shared_dir)


@pytest.mark.long
def test_hostile_paths_are_seen_under_their_own_names(
    house_here: Callable[..., CommandWrapper], shared_dir: Path
) -> None:
    chance = random.Random(1)
    names = list(dict.fromkeys(hostile(chance, but_for="/\n") for _ in range(3 * NUM_PATHS)))
    paths = [shared_dir / name for name in names if name not in {".", ".."}][:NUM_PATHS]
    assert len(paths) == NUM_PATHS
    for path in paths:
        path.mkdir()
        (path / "x").write_text(path.name)
    for start in range(0, NUM_PATHS, PATHS_A_CALL):
        some = [str(path) for path in paths[start : start + PATHS_A_CALL]]
        wrapper = house_here([Bind(path, path) for path in some], environ={}, work_dir=some[0])

        _, where, read = run_inside(wrapper, TELL, *some, environ={"PATH": "/usr/bin:/bin"})

        assert where == some[0]
        assert read == [Path(path).name for path in some]


@pytest.mark.long
def test_an_image_can_be_looked_into_before_it_is_used(
    cluster: Cluster, login: LoginNode, program: Apptainer, images: dict[str, Path]
) -> None:
    path = {"PATH": f"{program.bin_dir}:/usr/bin:/bin"}
    asked = ["container", "check", "digits.yaml", "--json", *housed(program, images["sandbox"])]

    good = login.type(*asked, env=path)
    bad = login.type(*asked, "container.binds=[/usr:/usr:ro]", env=path)  # without the packages

    assert good.returncode == 0, good.stdout + good.stderr
    found = json.loads(good.stdout)
    assert (found["runtime"], found["problems"]) == ("apptainer", [])
    assert {"torch", "msgspec", "xxhash", "ddp_hpc"} <= found["modules"].keys()
    assert bad.returncode == 1
    assert "torch cannot be imported: ModuleNotFoundError: No module named 'torch'" in bad.stdout


def test_an_image_that_is_not_there_is_refused_before_the_queue(login: LoginNode) -> None:
    done = login.type("submit", "digits.yaml", "--cluster", "slurm", "container.image=images/none.sif")

    assert done.returncode == 2
    assert f"`container.image` is {login.folder}/images/none.sif, but there is no such file or directory" in done.stderr
    assert not login.run("digits").path.exists()


@pytest.mark.long
def test_a_user_without_the_runtime_is_told_by_the_job(login: LoginNode, images: dict[str, Path]) -> None:
    asked = [*SMALL, *world(1, 1), f"container.image={images['sandbox']}"]
    done = login.type("submit", "digits.yaml", "--cluster", "slurm", *asked, "--wait")

    assert done.returncode != 0
    assert "`container.image` needs apptainer or singularity" in login.status("digits")["reason"]
