"""How long a sweep of 1,000 points takes to submit; beside plain sbatch of a job array of as many tasks, of the same script.

On the test cluster (real Slurm, so as root), on its login node. All jobs are held, so that none starts meanwhile, and are cancelled after
each row. `ddp-hpc submit` reads the points, checks each, writes the sweep's directory and asks Slurm whether it would accept the script
(`sbatch --test-only`) before it sends the array; plain sbatch only sends it.
"""

from __future__ import annotations

import itertools
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.rounds import Benchmark, Row, Samples, Verdict, added, judge, run_rounds, shown
from tests.slurm.cluster import USER, Cluster, booted, why_not
from tests.slurm.runs import LoginNode

NUM_POINTS = 1000
WALL = "wall_s"
PYTHON, PLAIN, OURS = "limit: python -c pass", "plain sbatch --array=0-999", "ddp-hpc submit --points, 1,000 points"
CONSOLE_SCRIPT = "import sys; from ddp_hpc.cli import main; sys.exit(main())"
TIMED = 'begin=$EPOCHREALTIME; "$@" >out 2>err || { cat err >&2; exit 1; }; echo "$begin $EPOCHREALTIME"'


class Login:
    """The login node with a script and a file of points; each submission makes a sweep of another name."""

    def __init__(self, cluster: Cluster) -> None:
        folder = Path(tempfile.mkdtemp(dir=cluster.shared))
        shutil.chown(folder, USER, USER)
        self._login, self._numbers = LoginNode(cluster, folder), itertools.count()
        points = "".join(f"- {{lr: {number / 1000}, seed: {number % 5}}}\n" for number in range(NUM_POINTS))
        for name, text in (("train.py", "print('trained')\n"), ("points.yaml", points)):
            (folder / name).write_text(text)
            shutil.chown(folder / name, USER, USER)
        self._script: Path | None = None

    def python(self) -> Mapping[str, float]:
        return self._timed(sys.executable, "-c", "pass")

    def ours(self) -> Mapping[str, float]:
        name = f"sweep-{next(self._numbers)}"
        words = ["submit", f"name={name}", "slurm.extra.hold=true", "--cluster", "slurm", "--points", "points.yaml"]
        script = ["--", "python", "train.py", "--lr", "{lr}", "--seed", "{seed}"]
        figures = self._timed(sys.executable, "-c", CONSOLE_SCRIPT, *words, *script)
        self._script = self._login.run(name).job_script
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
    with booted("bench") as cluster:
        login = Login(cluster)
        rows: Sequence[Row] = [
            Row(name, partial(each))
            for name, each in ((PYTHON, login.python), (PLAIN, login.plain), (OURS, login.ours))
        ]
        return run_rounds("sweep", rows, rounds=rounds)


def verdicts(samples: Samples) -> list[Verdict]:
    """Hold the added time against the target; show beside it how much of it is the start of Python."""
    added_ms = [1e3 * each for each in samples.differences(WALL, of=OURS, less=PLAIN)]
    python_ms = [1e3 * each for each in samples.by_row[PYTHON][WALL]]
    return [
        judge("a sweep's time, less plain sbatch's", added_ms, unit="ms", limit=60, wanted="at most"),
        judge("of these: the start of Python itself", python_ms, unit="ms"),
    ]


BENCHMARK = Benchmark(
    name="sweep",
    title="Submission of a sweep",
    rounds=15,
    measure=measure,
    columns=[shown("ms", WALL, scale=1e3, digits=0), added("added to plain sbatch, s", WALL, to=PLAIN, digits=3)],
    verdicts=verdicts,
)
