"""What is typed on a login node answers at once: it imports no torch."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_hpc.config import render_resolved, resolve
from ddp_hpc.ledger import record_start
from ddp_hpc.run_dir import RunDir

HEAVY = {"numpy", "submitit", "torch", "torchvision"}

THEN_SAY_WHAT_IS_LOADED = """
import sys
try:
    from ddp_hpc.cli import main
    code = main()
except SystemExit as end:
    code = end.code
print("loaded:", *sys.modules, file=sys.stderr)
sys.exit(code)
"""

VERBS = {
    "--help": ["--help"],
    "config": ["config", "train.lr"],
    "list": ["list"],
    "status": ["status", "digits"],
    "status --json": ["status", "digits", "--json"],
    "submit --dry-run": ["submit", "digits.yaml", "name=other", "--dry-run"],
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a directory with a configuration and a run that has begun."""
    (tmp_path / "digits.yaml").write_text("train:\n  epochs: 1\n", encoding="utf-8")
    run = RunDir(tmp_path / "runs" / "digits")
    run.path.mkdir(parents=True)
    run.config.write_text(render_resolved(resolve(tmp_path / "digits.yaml", [], {})), encoding="utf-8")
    record_start(run, attempt=0, job_id="local-1")
    return tmp_path


def loaded_by(code: str, *args: str, cwd: Path) -> set[str]:
    """Run Python code with arguments; return the modules it says are loaded at its end."""
    argv = [sys.executable, "-c", code, *args]
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].removeprefix("loaded:").split())


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_of_the_login_node_imports_nothing_heavy(verb: str, directory: Path) -> None:
    loaded = loaded_by(THEN_SAY_WHAT_IS_LOADED, *VERBS[verb], cwd=directory)

    assert "ddp_hpc.cli" in loaded
    assert loaded & HEAVY == set()


def test_the_guard_sees_torch_where_it_is_imported(directory: Path) -> None:
    """It would be blind where torch is not installed at all."""
    assert importlib.util.find_spec("torch") is not None

    loaded = loaded_by("import ddp_hpc.train.recipe\n" + THEN_SAY_WHAT_IS_LOADED, "--help", cwd=directory)

    assert "torch" in loaded


@pytest.mark.parametrize(("verb", "most"), [("--help", 100), ("status", 170)])
def test_what_is_asked_often_imports_little(verb: str, most: int, directory: Path) -> None:
    """Imports are nearly all that an answer takes: 0.1 s of CPU time for `status`; a clock would measure the machine."""
    assert len(loaded_by(THEN_SAY_WHAT_IS_LOADED, *VERBS[verb], cwd=directory)) < most
