"""Code that a job imports besides the run's own: what lies in the work tree is frozen with it, what lies elsewhere is named."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddp_hpc.launch.submission.request import SubmitRequest
from ddp_hpc.launch.submission.slurm import freeze_code, job_import_paths
from ddp_hpc.launch.submission.snapshot import editable_dirs
from ddp_hpc.run.config.resolve import Resolved
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import RunSpec, ScriptSpec
from tests.unit.made_repository import git


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a work tree with a source layout and a script, beside a directory of tools."""
    for name in ("project/train.py", "project/src/mine/__init__.py", "tools/tool.py", "runs/run/config.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    git(tmp_path / "project", "init", "--quiet")
    monkeypatch.chdir(tmp_path / "project")
    users = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # whoever runs the tests may have some
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in users])
    return tmp_path / "project"


def spec_of(**sections: object) -> RunSpec:
    runs_dir = str(Path.cwd().parent / "runs")
    return RunSpec(name="run", runs_dir=runs_dir, script=ScriptSpec(command=("python", "train.py")), **sections)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["PYTHONPATH", "env.PYTHONPATH", "pth", "finder"])
def test_a_source_layout_in_the_work_tree_is_imported_from_the_copy(
    how: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, environ, spec = project / "src", dict[str, str](), spec_of()
    if how == "PYTHONPATH":
        environ = {"PYTHONPATH": str(source)}
    elif how == "env.PYTHONPATH":
        spec = spec_of(env={"PYTHONPATH": str(source)})
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

    assert editable_dirs(environ) == [tools]
    request = SubmitRequest(resolved=Resolved(spec_of(), {}), import_paths=[project], environ=environ)
    assert job_import_paths(request) == [request.run.snapshot]
    [_, note] = freeze_code(request, request.run)
    assert note.startswith(f"note: the copy does not hold {tools} (PYTHONPATH")
