"""How long a sweep of 1,000 points takes to submit; beside plain sbatch of a job array of as many tasks, of the same script.

On the test cluster (real Slurm, so as root), on its login node. All jobs are held, so that none starts meanwhile, and are cancelled after
each row. `ddp-hpc submit` reads the points, checks each, writes the sweep's directory and asks Slurm whether it would accept the script
(`sbatch --test-only`) before it sends the array; plain sbatch only sends it. submitit's `map_array` pickles a call of a function for each point. All byte code is on
disk before the first round, as in an installed package.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.rounds import Benchmark, Row, Samples, Verdict, added, judge, run_rounds, shown
from tests.slurm.cluster import USER, Cluster, booted, why_not
from tests.slurm.runs import LoginNode

ROOT = Path(__file__).resolve().parent.parent
NUM_POINTS = 1000
WALL = "wall_s"
SUBMITIT, SUBMITIT_ARRAY = "limit: import submitit, submit one job", "submitit: map_array of 1,000 points"
OTHERS = "limit: Python, what others wrote, 1,000 points"
PYTHON, PLAIN, OURS = "limit: python -c pass", "plain sbatch --array=0-999", "ddp-hpc submit --points, 1,000 points"
OF_OTHERS = (
    "jinja2",
    "msgspec",
    "psutil",
    "submitit",
    "xxhash",
    "yaml",
    "ddp_hpc.cli.verbs.submit",
    "ddp_hpc.launch.sweep.manage_sweep",
)
CONSOLE_SCRIPT = "import sys; from ddp_hpc.cli import main; sys.exit(main())"
SUBMITIT_CODE = """
import sys, submitit
def train(lr, seed): pass
executor = submitit.SlurmExecutor(folder=sys.argv[1])
executor.update_parameters(additional_parameters={"hold": True})
if sys.argv[2] == "1":
    executor.submit(train, 0.1, 0)
else:
    points = range(int(sys.argv[2]))
    executor.map_array(train, [number / 1000 for number in points], [number % 5 for number in points])
"""
OTHERS_CODE = """
import argparse, dataclasses, hashlib, json, logging, pathlib, subprocess
import jinja2, yaml
with open("points.yaml") as file:
    yaml.load(file, yaml.CSafeLoader)
"""
"""What no command can do without that renders a template and reads a file of points, before it does anything of its own."""
TIMED = 'begin=$EPOCHREALTIME; "$@" >out 2>err || { cat err >&2; exit 1; }; echo "$begin $EPOCHREALTIME"'


class Login:
    """The login node with a script and a file of points; each submission makes a sweep of another name."""

    def __init__(self, cluster: Cluster) -> None:
        # submitit's files lie elsewhere: `ddp-hpc submit` copies the directory of the user's code.
        folder, self._pickles = (Path(tempfile.mkdtemp(dir=cluster.shared)) for _ in range(2))
        for each in (folder, self._pickles):
            shutil.chown(each, USER, USER)
        self._login, self._numbers = LoginNode(cluster, folder), itertools.count()
        points = "".join(f"- {{lr: {number / 1000}, seed: {number % 5}}}\n" for number in range(NUM_POINTS))
        for name, text in (("train.py", "print('trained')\n"), ("points.yaml", points)):
            (folder / name).write_text(text)
            shutil.chown(folder / name, USER, USER)
        self._script: Path | None = None

    def python(self) -> Mapping[str, float]:
        return self._timed(sys.executable, "-c", "pass")

    def others(self) -> Mapping[str, float]:
        return self._timed(sys.executable, "-c", OTHERS_CODE)

    def ours(self) -> Mapping[str, float]:
        name = f"sweep-{next(self._numbers)}"
        words = ["submit", f"name={name}", "slurm.extra.hold=true", "--cluster", "slurm", "--points", "points.yaml"]
        script = ["--", "python", "train.py", "--lr", "{lr}", "--seed", "{seed}"]
        figures = self._timed(sys.executable, "-c", CONSOLE_SCRIPT, *words, *script)
        self._script = self._login.run(name).job_script
        self._login.cluster.cancel_all()
        return figures

    def submitit(self, num_points: int) -> Mapping[str, float]:
        folder = self._pickles / str(next(self._numbers))
        figures = self._timed(sys.executable, "-c", SUBMITIT_CODE, str(folder), str(num_points))
        self._login.cluster.cancel_all()
        return figures

    def plain(self) -> Mapping[str, float]:
        if self._script is None:
            self.ours()
        figures = self._timed("sbatch", f"--array=0-{NUM_POINTS - 1}", str(self._script), "0")
        self._login.cluster.cancel_all()
        return figures

    def _timed(self, *argv: str) -> Mapping[str, float]:
        """Run a command on the login node; return how long it took there, without the way to the node."""
        done = self._login.cluster.run("bash", "-c", TIMED, "timed", *argv, cwd=self._login.folder)
        begun, ended = map(float, done.stdout.split())
        return {WALL: ended - begun}


def measure(rounds: int) -> Samples:
    """Boot a cluster, and submit there."""
    if reason := why_not():
        raise SystemExit(f"no Slurm cluster can be booted here: {reason}")
    # The login node's user may not write byte code beside the sources, and to compile them takes as long as all the rest.
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(ROOT / "ddp_hpc")], check=True)
    subprocess.run([sys.executable, "-c", f"import {', '.join(OF_OTHERS)}"], env={"PYTHONPATH": str(ROOT)}, check=True)
    with booted("bench") as cluster:
        login = Login(cluster)
        rows: Sequence[Row] = [
            Row(name, partial(each))
            for name, each in (
                (PYTHON, login.python),
                (OTHERS, login.others),
                (PLAIN, login.plain),
                (SUBMITIT, partial(login.submitit, 1)),
                (SUBMITIT_ARRAY, partial(login.submitit, NUM_POINTS)),
                (OURS, login.ours),
            )
        ]
        return run_rounds("sweep", rows, rounds=rounds)


def verdicts(samples: Samples) -> list[Verdict]:
    """Hold the added time against the target; show beside it how much of it is the start of Python."""
    added_ms = [1e3 * each for each in samples.differences(WALL, of=OURS, less=PLAIN)]
    python_ms = [1e3 * each for each in samples.by_row[PYTHON][WALL]]
    others_ms = [1e3 * each for each in samples.by_row[OTHERS][WALL]]
    of_one_ms = [1e3 * each for each in samples.differences(WALL, of=SUBMITIT, less=PLAIN)]
    of_array = [
        by / ours for by, ours in zip(samples.by_row[SUBMITIT_ARRAY][WALL], samples.by_row[OURS][WALL], strict=True)
    ]
    return [
        judge("a sweep's time, less plain sbatch's", added_ms, unit="ms", limit=60, wanted="at most"),
        judge("of these: the start of Python itself", python_ms, unit="ms"),
        judge("of these: Python, what others wrote, and reading the points", others_ms, unit="ms"),
        judge("submitit's time for one job, less plain sbatch's", of_one_ms, unit="ms"),
        judge("submitit's map_array, by our sweep", of_array, unit="x"),
    ]


BENCHMARK = Benchmark(
    name="sweep",
    title="Submission of a sweep",
    rounds=15,
    measure=measure,
    columns=[shown("ms", WALL, scale=1e3, digits=0), added("added to plain sbatch, s", WALL, to=PLAIN, digits=3)],
    verdicts=verdicts,
)
