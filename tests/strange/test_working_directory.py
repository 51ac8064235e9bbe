"""A working directory whose modules are called as Python's: none of our processes takes them for those."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cluster.rendezvous.worker_env import GIVEN_VARIABLE, USERS_CODE
from ddp_hpc.job.node.python_environ import IMPORT_PATH_NAME, SAFE_PATH_ENVIRON, make_users_code_importable
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.train.recipe import load_builder

NAMES = ("argparse", "json", "random", "socket", "subprocess", "yaml_of_mine", "ddp_hpc_of_mine")
RECIPE = """
import json, os, random, socket, sys, torch
from torch.utils.data import TensorDataset
from ddp_hpc.train.recipe import Recipe
import yaml_of_mine

def build(where):
    found = {"path": sys.path, "safe": os.environ.get("PYTHONSAFEPATH"), "pythonpath": os.environ["PYTHONPATH"]}
    with open(where, "w") as file:
        json.dump(found, file)
    data = TensorDataset(torch.randn(8, 4), torch.randint(0, 2, (8,)))
    return Recipe(model=torch.nn.Linear(4, 2), train_data=data, loss=torch.nn.functional.cross_entropy)
"""
CONFIG = "recipe: {target: 'tiny:build', args: {where: seen.json}}\ntrain: {global_batch_size: 8, epochs: 1}\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current directory, full of modules that leave a note when they are imported."""
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path)!r} + '/imported', 'a').write('{name}\\n')\n")
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "tiny.py").write_text(RECIPE)
    return tmp_path


@pytest.mark.long
def test_a_run_imports_its_recipe_from_there_and_pythons_modules_from_python(here: Path) -> None:
    argv = [sys.executable, "-m", "ddp_hpc", "submit", "run.yaml", "--wait", f"recipe.args.where={here}/seen.json"]

    done = subprocess.run(argv, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert set((here / "imported").read_text().split()) == {"yaml_of_mine"}
    seen = json.loads((here / "seen.json").read_text())
    assert seen["safe"] is None  # what the recipe starts is its own
    assert seen["pythonpath"].split(os.pathsep)[0] == str(here)
    assert RunDir(here / "runs/run").done.exists()


@pytest.mark.parametrize("words", [["ddp_hpc.job.supervisor"], ["ddp_hpc.job.node.unpack"], ["ddp_hpc.cluster.rendezvous.interfaces"], ["ddp_hpc.job.node.torchrun_node"]])  # fmt: skip
@pytest.mark.parametrize("is_safe", [True, False], ids=["3.11", "3.10"])
def test_no_entry_point_imports_what_lies_there(words: list[str], is_safe: bool, here: Path) -> None:
    environ = {**os.environ, **(SAFE_PATH_ENVIRON if is_safe else {})}

    subprocess.run([sys.executable, "-m", *words, "--help"], env=environ, capture_output=True, check=False)

    assert not (here / "imported").exists()


def test_the_copy_of_the_code_comes_before_what_the_user_exports_and_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = [path for path in sys.path if path.endswith("site-packages")]
    monkeypatch.setattr(sys, "path", ["/users/own", *sys.path])
    environ = {IMPORT_PATH_NAME: f"{tmp_path}/snapshot", "PYTHONPATH": "/users/own", **SAFE_PATH_ENVIRON}

    make_users_code_importable(environ)

    places = [sys.path.index(path) for path in (os.__file__.rpartition("/")[0], f"{tmp_path}/snapshot", "/users/own")]
    assert places == sorted(places)
    assert places[-1] < sys.path.index(installed[0])
    del environ[GIVEN_VARIABLE]  # what a run that this process submits is to have instead
    assert environ == {"PYTHONPATH": f"{tmp_path}/snapshot:/users/own", USERS_CODE: f"{tmp_path}/snapshot"}


@pytest.mark.parametrize("target", ["code:build", "sys:build"])
def test_a_recipe_called_as_a_module_of_pythons_is_told_to_take_another_name(target: str) -> None:
    with pytest.raises(ConfigError, match="comes first: give your module another name"):
        load_builder(target)


def test_a_users_own_word_on_safe_paths_stays() -> None:
    environ = {"PYTHONSAFEPATH": "1"}

    make_users_code_importable(environ)

    assert environ == {"PYTHONSAFEPATH": "1"}
