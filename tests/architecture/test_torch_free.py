"""What is typed on a login node answers at once: it imports no torch."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_hpc.run.config.resolve import render_resolved, resolve
from ddp_hpc.run.run_dir.ledger import record_start
from ddp_hpc.run.run_dir.paths import RunDir

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
OF_A_SWEEP = ["submit", "name=grid", "--cluster=slurm", "slurm.extra.hold=true", "--sweep=seed=0..9"]


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


@pytest.mark.long
def test_the_guard_sees_torch_where_it_is_imported(directory: Path) -> None:
    """It would be blind where torch is not installed at all."""
    assert importlib.util.find_spec("torch") is not None

    loaded = loaded_by("import ddp_hpc.train.recipe\n" + THEN_SAY_WHAT_IS_LOADED, "--help", cwd=directory)

    assert "torch" in loaded


SLOW = {
    "asyncio",
    "concurrent",
    "csv",
    "difflib",
    "email",
    "importlib.metadata",
    "jinja2",
    "multiprocessing",
    "psutil",
    "random",
    "rich",
    "shlex",
    "socket",
    "subprocess",
    "tempfile",
    "unittest",
    "xxhash",
    "yaml",
}
"""Modules of others that take 1 to 20 ms to import; Python itself takes 12 ms to start. Records need msgspec, which takes 10 ms and
is not among them."""
SLOW_OF_OURS = {
    "ddp_hpc.launch.api",
    "ddp_hpc.run.checkpoints.checkpoint_store",
    "ddp_hpc.run.config",
    "ddp_hpc.cluster.containers",
    "ddp_hpc.run.run_dir.software_versions",
    "ddp_hpc.run.run_dir.failure_reports",
    "ddp_hpc.launch.render",
    "ddp_hpc.run.requeue",
    "ddp_hpc.run.checkpoints.shards",
    "ddp_hpc.cluster.slurm.client",
    "ddp_hpc.cluster.slurm.queries",
    "ddp_hpc.run.spec",
    "ddp_hpc.launch.submission",
    "ddp_hpc.watch.queue",
}
"""Modules of ours that answer other questions: what to submit, what Slurm says, what a checkpoint holds."""
NEEDED_BY_A_DRY_RUN = {
    *("ddp_hpc.run.config", "ddp_hpc.run.spec", "ddp_hpc.launch.submission"),
    *("psutil", "random", "shlex", "socket", "subprocess", "tempfile", "yaml"),
}
"""It reads a configuration, and describes what the back end would start."""
OF_RUNS = {"ddp_hpc.cli.follow_run", "ddp_hpc.cli.summary", "ddp_hpc.watch.follow", "ddp_hpc.watch.status"}


@pytest.fixture
def _nothing_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no Slurm, no site profile and no settings: each has a command load more."""
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DDP_HPC_SITE_PROFILE", raising=False)


@pytest.mark.usefixtures("_nothing_set")
@pytest.mark.parametrize(("verb", "most"), [("--help", 90), ("list", 180), ("status", 186), ("submit --dry-run", 245)])
def test_what_is_asked_often_imports_little(verb: str, most: int, directory: Path) -> None:
    """Imports are nearly all that an answer takes; `make bench ARGS=commands` measures it, and a clock here would be wrong."""
    loaded = loaded_by(THEN_SAY_WHAT_IS_LOADED, *VERBS[verb], cwd=directory)

    assert len(loaded - {"sitecustomize"}) <= most  # which Debian's Python loads at its start


@pytest.mark.usefixtures("_nothing_set")
@pytest.mark.parametrize("verb", ["--help", "list", "status"])
def test_what_is_asked_often_imports_nothing_slow(verb: str, directory: Path) -> None:
    loaded = loaded_by(THEN_SAY_WHAT_IS_LOADED, *VERBS[verb], cwd=directory)

    assert loaded & (SLOW | SLOW_OF_OURS) == set()


def test_help_makes_no_dataclasses(directory: Path) -> None:
    assert "dataclasses" not in loaded_by(THEN_SAY_WHAT_IS_LOADED, "--help", cwd=directory)


@pytest.mark.usefixtures("_nothing_set")
def test_a_dry_run_imports_what_reads_a_configuration_and_nothing_else_slow(directory: Path) -> None:
    loaded = loaded_by(THEN_SAY_WHAT_IS_LOADED, *VERBS["submit --dry-run"], cwd=directory)

    assert loaded & (SLOW | SLOW_OF_OURS | OF_RUNS) <= NEEDED_BY_A_DRY_RUN


@pytest.mark.usefixtures("_nothing_set")
def test_a_sweep_for_slurm_imports_nothing_that_only_a_look_at_runs_or_another_back_end_needs(directory: Path) -> None:
    program = directory / "bin" / "sbatch"
    program.parent.mkdir()
    for name in ("sbatch", "scontrol"):
        program.with_name(name).symlink_to("/bin/true")
    anywhere = (
        "from ddp_hpc.launch.submission.submit_checks import capacity\ncapacity.NODE_LOCAL_DIRS = ()\n"  # /tmp, too
    )
    alone = THEN_SAY_WHAT_IS_LOADED.replace(
        "import sys\n", f"import os, sys\nos.environ['PATH'] = '{program.parent}'\n{anywhere}", 1
    )

    (directory / "train.py").touch()
    runs = "runs_dir=/home/nobody-here/runs"  # the test's own directory may be a node's own
    loaded = loaded_by(alone, *OF_A_SWEEP, runs, "--dry-run", "--", "python", "train.py", cwd=directory)

    needless = {"concurrent", "ddp_hpc.launch.sweep.point_states", "ddp_hpc.launch.submission.local"}
    assert "ddp_hpc.launch.sweep.array" in loaded
    assert loaded & (needless | OF_RUNS | {"ddp_hpc.watch"}) == set()
