"""The nine wings: old names lead into them, each says what it is for, and all but the command line work without `prove`."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import ddp_hpc
from ddp_hpc.moved import MOVED

PACKAGE = Path(ddp_hpc.__file__).parent
WINGS = ("cli", "prove", "launch", "watch", "job", "train", "cluster", "run", "base")
PROVING = {f"cli/verbs/{verb}.py" for verb in ("audit", "bisect", "certify", "drill", "replay")} | {
    "cli/replay_text.py"
}
HELD_BY_JOBS = (
    "job.supervisor",
    "job.node.agent",
    "job.node.task",
    "train.worker",
    "machine.node",
    "node_checks.node",
    "rendezvous.interfaces",
    "rendezvous.links.node",
    "script.worker",
    "sweep.task",
    "job.node.spawned",
    "cluster.machine.node",
    "cluster.node_checks.node",
    "cluster.rendezvous.links.node",
)
"""Modules that a job's script, or a process of a job, starts by their names as 00b53da has written them, or 3d20d71."""
HELD_BY_USERS = ("errors", "train.recipe", "train.recipes.rank_zero_first")
"""Modules that users' programs import, as the documents of 00b53da show them."""
FROM_ADAPTERS = ("adapters.lightning", "adapters.transformers")
"""Likewise; they need libraries that these tests have not."""


def test_the_top_holds_the_wings_and_what_forwards_to_them() -> None:
    top = {path.name for path in PACKAGE.iterdir() if path.name not in {"__pycache__", "py.typed"}}

    assert top == {*WINGS, "__init__.py", "__main__.py", "moved.py"}


@pytest.mark.parametrize("wing", WINGS)
def test_each_wing_says_what_it_is_for_and_what_is_public(wing: str) -> None:
    said = ast.get_docstring(ast.parse((PACKAGE / wing / "__init__.py").read_text("utf-8"))) or ""

    assert re.search(r"\bpublic\b", said, re.IGNORECASE), f"`{wing}` does not say what of it is public"


@pytest.mark.parametrize("name", [*HELD_BY_JOBS, *HELD_BY_USERS])
def test_a_module_is_found_by_the_name_that_it_had(name: str) -> None:
    now = name
    while old := next((one for one in MOVED if f"{now}.".startswith(f"{one}.")), ""):
        now = MOVED[old] + now[len(old) :]

    module = importlib.import_module(f"ddp_hpc.{name}")

    assert module is importlib.import_module(f"ddp_hpc.{now}")
    assert module.__name__ == f"ddp_hpc.{now}"


@pytest.mark.parametrize("name", FROM_ADAPTERS)
def test_an_adapter_is_found_by_the_name_that_it_had(name: str) -> None:
    assert find_spec(f"ddp_hpc.{name}") is not None
    assert find_spec(f"ddp_hpc.train.{name}") is not None


@pytest.mark.parametrize("old", MOVED)
def test_somebody_asks_for_each_old_name(old: str) -> None:
    names = (*HELD_BY_JOBS, *HELD_BY_USERS, *FROM_ADAPTERS)

    assert any(f"{name}.".startswith(f"{old}.") for name in names)


@pytest.mark.parametrize(
    "name",
    [one for one in HELD_BY_JOBS if one != "script.worker" and any(f"{one}.".startswith(f"{old}.") for old in MOVED)],
)
def test_python_starts_a_module_by_the_name_that_it_had(name: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", f"ddp_hpc.{name}", "--help"]

    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.stdout.startswith("usage: ddp_hpc.")


def test_a_name_that_no_module_ever_had_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("ddp_hpc.sweep.no_such_module")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("ddp_hpc.no_such_module")


def test_only_the_verbs_that_prove_import_what_proves() -> None:
    users = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if not path.is_relative_to(PACKAGE / "prove") and "ddp_hpc.prove" in path.read_text("utf-8")
    }

    assert users == PROVING


def test_a_run_trains_and_is_looked_at_where_the_wing_that_proves_is_deleted(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "ddp_hpc", ignore=shutil.ignore_patterns("__pycache__", "prove"))
    shutil.copytree(PACKAGE.parent / "sbatch_templates", tmp_path / "sbatch_templates")
    (tmp_path / "train.py").write_text("print('it has trained')\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def command(*words: str) -> str:
        argv = [sys.executable, "-m", "ddp_hpc", *words]
        done = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    command("submit", "name=short", "--cluster=local", "--follow", "--", sys.executable, "train.py")

    assert json.loads(command("status", "short", "--json"))["state"] == "finished"
    assert "it has trained" in command("logs", "short")
    assert "short" in command("list")
    assert "usage:" in command("--help")
