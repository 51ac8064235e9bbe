"""Code that a job imports besides the run's own: what lies in the work tree is frozen with it, what lies elsewhere is named."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_hpc.launch.submission.request import SubmitRequest
from ddp_hpc.launch.submission.slurm import freeze_code, job_import_paths
from ddp_hpc.launch.submission.snapshot import writable_import_dirs
from ddp_hpc.run.config.resolve import Resolved
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import RecipeSpec, RunSpec, ScriptSpec
from tests.unit.made_repository import git


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a work tree with a source layout and a script, beside a directory of tools."""
    for name in (
        "project/train.py",
        "project/src/mine/__init__.py",
        "project/src/mine/net.py",
        "tools/tool.py",
        "runs/run/config.yaml",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    git(tmp_path / "project", "init", "--quiet")
    monkeypatch.chdir(tmp_path / "project")
    users = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # whoever runs the tests may have some
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in users])
    return tmp_path / "project"


def spec_of(**sections: object) -> RunSpec:
    given = {"script": ScriptSpec(command=("python", "train.py")), **sections}
    return RunSpec(name="run", runs_dir=str(Path.cwd().parent / "runs"), **given)  # type: ignore[arg-type]


MODULE = ScriptSpec(command=("python", "-m", "mine.net"))
STARTED = [{}, {"script": MODULE}, {"script": ScriptSpec(), "recipe": RecipeSpec(target="mine.net:build")}]


@pytest.mark.parametrize("started", STARTED, ids=["script", "module", "recipe"])
@pytest.mark.parametrize("how", ["PYTHONPATH", "relative", "env.PYTHONPATH", "pth", "finder"])
def test_a_source_layout_in_the_work_tree_is_imported_from_the_copy(
    how: str, started: Mapping[str, Any], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, environ, spec = project / "src", dict[str, str](), spec_of(**started)
    if how in {"PYTHONPATH", "relative"}:
        environ = {"PYTHONPATH": str(source) if how == "PYTHONPATH" else "src"}
    elif how == "env.PYTHONPATH":
        spec = spec_of(**started, env={"PYTHONPATH": str(source)})
    elif how == "pth":
        monkeypatch.setattr(sys, "path", [*sys.path, str(source)])
    else:
        finder = SimpleNamespace(MAPPING={"mine": str(source / "mine")})
        monkeypatch.setattr(sys, "modules", {**sys.modules, "__editable___mine_1_finder": finder})

    request = SubmitRequest(resolved=Resolved(spec, {}), import_paths=[project], environ=environ)
    paths = job_import_paths(request)
    notes = freeze_code(request, request.run)

    snapshot = RunDir(project.parent / "runs" / "run").snapshot
    assert paths == [snapshot, snapshot / "src"]
    assert (paths[1] / "mine" / "__init__.py").is_file()
    assert len(notes) == 1


def test_what_lies_elsewhere_is_named_if_the_user_may_edit_it(project: Path) -> None:
    tools = project.parent / "tools"
    environ = {"PYTHONPATH": f"{tools}:{sys.prefix}:/nowhere"}

    assert writable_import_dirs(environ) == [tools]
    request = SubmitRequest(resolved=Resolved(spec_of(), {}), import_paths=[project], environ=environ)
    assert job_import_paths(request) == [request.run.snapshot]
    [_, note] = freeze_code(request, request.run)
    assert note.startswith(f"note: ddp-hpc does not copy {tools} (PYTHONPATH")


def test_a_module_beside_the_working_directory_is_in_the_copy_of_its_work_tree(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = project / "experiments"
    here.mkdir()
    request = SubmitRequest(
        resolved=Resolved(spec_of(script=MODULE), {}), import_paths=[here], environ={"PYTHONPATH": str(project / "src")}
    )

    freeze_code(request, request.run)

    copy = request.run.snapshot
    assert job_import_paths(request) == [copy / "experiments", copy / "src"]
    assert (copy / "src" / "mine" / "net.py").is_file()


def test_a_module_outside_the_work_tree_is_named_and_not_copied(project: Path) -> None:
    tools = project.parent / "tools"
    request = SubmitRequest(
        resolved=Resolved(spec_of(script=ScriptSpec(command=("python", "-m", "tool"))), {}),
        import_paths=[project],
        environ={"PYTHONPATH": str(tools)},
    )

    assert job_import_paths(request) == []
    [note] = freeze_code(request, request.run)
    assert note.startswith(f"note: ddp-hpc does not copy {tools} (PYTHONPATH")


def test_a_variable_that_is_null_is_as_in_the_shell(project: Path) -> None:
    spec = spec_of(script=MODULE, env={"PYTHONPATH": None})
    request = SubmitRequest(
        resolved=Resolved(spec, {}), import_paths=[project], environ={"PYTHONPATH": str(project / "src")}
    )

    assert job_import_paths(request) == [request.run.snapshot, request.run.snapshot / "src"]
