"""How long a command takes, as a multiple of the start of Python itself (`python -c pass`); nearly all of it is imports.

Each command is one process, started as the console script starts it, in a directory with a configuration and one run. Slurm
is not on PATH, and no site profile applies. All byte code is on disk before the first round that counts, as in an installed
package; where it cannot be written, nothing is measured.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.rounds import Benchmark, Column, Row, Samples, Verdict, judge, run_rounds
from ddp_hpc.run.config.resolve import render_resolved, resolve
from ddp_hpc.run.run_dir.paths import RunDir

ROOT = Path(__file__).resolve().parent.parent
WALL, CPU = "wall_s", "cpu_s"
PYTHON = "limit: python -c pass"
CONSOLE_SCRIPT = "import sys; from ddp_hpc.cli import main; sys.exit(main())"
COMMANDS: Mapping[str, tuple[Sequence[str], float]] = {
    "ddp-hpc --help": (["--help"], 4),
    "ddp-hpc status": (["status", "digits"], 5),
    "ddp-hpc list": (["list"], 5),
    "ddp-hpc submit --dry-run": (["submit", "digits.yaml", "name=other", "--dry-run"], 9),
}
"""A command's arguments, and its target: at most so many times Python's start."""
NAME_UNCACHED = """
import os, sys
from ddp_hpc.cli import main
main()
specs = [getattr(module, "__spec__", None) for module in list(sys.modules.values())]
print(*(spec.name for spec in specs if spec and spec.cached and not os.path.exists(spec.cached)), file=sys.stderr)
"""
"""Runs a command, and then names the modules that it has loaded without byte code on disk."""
NUM_IMPORTS = 6
_IMPORT = re.compile(r"import time:\s+(?P<self>\d+) \|\s+\d+ \|\s+(?P<module>\S+)")


def make_directory(folder: Path) -> None:
    """Make a configuration, and a run that has begun."""
    (folder / "digits.yaml").write_text("train:\n  epochs: 1\n")
    run = RunDir(folder / "runs" / "digits")
    run.path.mkdir(parents=True)
    run.config.write_text(render_resolved(resolve(folder / "digits.yaml", [], {})))
    begun = {"attempt": 0, "job_id": "local-1", "host": "elsewhere", "pid": 1, "started_at": time.time()}
    run.attempts.write_text(json.dumps(begun) + "\n")


def require_byte_code(folder: Path) -> None:
    """Write the byte code of all that the commands import, and check that it is there.

    Raises:
        RuntimeError: if some cannot be written.
    """
    for words, _ in list(COMMANDS.values())[1:]:  # `--help` imports nothing that the others do not
        argv = [sys.executable, "-c", NAME_UNCACHED, *words]
        done = subprocess.run(argv, cwd=folder, env=_environ(folder), capture_output=True, text=True, check=True)
        missing = done.stderr.splitlines()[-1]
        if missing:
            raise RuntimeError(f"There is no byte code of {missing}. Make the folders of these modules writable.")


def _environ(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DDP_HPC", "SLURM"))}
    return {**kept, "HOME": str(folder), "PATH": str(Path(sys.executable).parent), "PYTHONPATH": str(ROOT)}


def _argv(words: Sequence[str], *options: str) -> list[str]:
    return [sys.executable, *options, "-c", CONSOLE_SCRIPT, *words]


def best_of_three(argv: Sequence[str], folder: Path) -> Mapping[str, float]:
    """Run a command three times; return the shortest time and the least CPU time."""
    tries = [timed(argv, folder) for _ in range(3)]
    return {figure: min(each[figure] for each in tries) for figure in (WALL, CPU)}


def timed(argv: Sequence[str], folder: Path) -> Mapping[str, float]:
    """Run a command; return how long it took, and its CPU time."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(argv, cwd=folder, env=_environ(folder), stdout=subprocess.DEVNULL, check=True)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {WALL: wall, CPU: after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def measure(rounds: int) -> Samples:
    """Measure Python's start and each command's."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_directory(folder)
        require_byte_code(folder)

        def row(title: str, argv: Sequence[str]) -> Row:
            return Row(title, lambda: best_of_three(argv, folder))

        rows = [row(title, _argv(words)) for title, (words, _) in COMMANDS.items()]
        return run_rounds("commands", [row(PYTHON, [sys.executable, "-c", "pass"]), *rows], rounds=rounds)


def costly_imports() -> Mapping[str, str]:
    """Return, for each command, the imports that cost most, each without what it imports itself: the best of five, in ms."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_directory(folder)
        return {title: _costliest(words, folder) for title, (words, _) in COMMANDS.items()}


def _costliest(words: Sequence[str], folder: Path) -> str:
    least: dict[str, int] = {}
    for _ in range(5):
        argv = _argv(words, "-X", "importtime")
        done = subprocess.run(argv, cwd=folder, env=_environ(folder), capture_output=True, text=True, check=True)
        for found in _IMPORT.finditer(done.stderr):
            least[found["module"]] = min(int(found["self"]), least.get(found["module"], sys.maxsize))
    most = sorted(least.items(), key=lambda item: -item[1])[:NUM_IMPORTS]
    return ", ".join(f"{module} {microseconds / 1000:.1f}" for module, microseconds in most)


def _best(samples: Samples, row: str, figure: str) -> float:
    return min(samples.by_row[row][figure])


def _times(samples: Samples, row: str, figure: str) -> float:
    """Return a row's best figure by the best of Python's start."""
    return _best(samples, row, figure) / _best(samples, PYTHON, figure)


def verdicts(samples: Samples) -> list[Verdict]:
    """Hold each command's best against its target, in time and in CPU time, which other work on the machine changes less."""
    kinds = {WALL: "by Python's start", CPU: "by its CPU time"}
    return [
        judge(f"{title}, {kind}", [_times(samples, title, figure)], limit=limit, wanted="at most")
        for figure, kind in kinds.items()
        for title, (_, limit) in COMMANDS.items()
    ]


BENCHMARK = Benchmark(
    name="commands",
    title="Start of commands",
    rounds=9,
    measure=measure,
    columns=[
        Column("best, ms", lambda samples, row: _best(samples, row, WALL) * 1e3, 0),
        Column("CPU time, ms", lambda samples, row: _best(samples, row, CPU) * 1e3, 0),
        Column("by Python's start", lambda samples, row: _times(samples, row, WALL)),
        Column("by its CPU time", lambda samples, row: _times(samples, row, CPU)),
    ],
    verdicts=verdicts,
    remarks=("imports that cost most, ms", costly_imports),
)
