"""The course of a storm: runs are submitted, faults come, all faults end, every run finishes, and is checked.

Each finishes by itself, unless Slurm could not launch its job and holds it: then the storm's user does what `status` says.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_hpc.base import processes
from ddp_hpc.run.checkpoints.checkpoint_names import committed_steps
from ddp_hpc.run.run_dir.ledger import Attempt, Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import read_progress
from ddp_hpc.watch.samples import read_steps_taken
from tests.campaigns.written import stamp
from tests.slurm.cluster import Cluster
from tests.slurm.faulty_runs import FAULTY, RECIPE
from tests.slurm.runs import LoginNode, world
from tests.slurm.storm.check import problems_of
from tests.slurm.storm.deeds import Weather
from tests.slurm.storm.plan import HANG_S, Fault

STEP_S = 1.2
"""A step's time in the storm: 12 samples a worker, 0.1 s each (`faulty_recipe`); afterwards a hundredth of a second."""
LAYOUTS = (
    world(2, 1),
    world(1, 2),
    (*world(2, 1), "data.num_workers=1"),
    (*world(2, 1), "launcher=srun"),
    (*world(2, 1), "launcher=torchrun"),
)
"""All are worlds of two, so that they all come to the same bits."""
COMMON = (
    *FAULTY,
    "train.epochs=100000",  # `max_steps` ends it
    "checkpoint.every_steps=4",
    "log.every_steps=4",
    f"restart.hang_timeout_s={HANG_S}",
    # A storm leaves a run no time between two faults; that a run gives up after three is shown elsewhere.
    "restart.max_no_progress=1000",
)
STILL_S = 300.0
"""After the storm: how long nothing may happen in a run."""
GONE_S = 45.0
"""After the storm: how long a run that has not finished may be without a job."""
LOOK_S = 2.0
HELD = "launch failed requeued held"
"""Slurm's reason where it could not launch a job, and holds it until somebody releases it."""
WAITER_S = 120.0
"""How long who waits for a run may need to see that it has finished."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A storm to be had."""

    seed: int
    minutes: float
    num_runs: int
    faults: Sequence[Fault]

    @property
    def steps(self) -> int:
        """So many that no run can finish in the storm."""
        return 4 * (int(self.minutes * 60 / STEP_S) // 4 + 5)


def storm(cluster: Cluster, login: LoginNode, asked: Asked, say: Say) -> dict[str, Any]:
    """Have it; return the result of its seed, as JSON."""
    login.add_recipe(RECIPE)
    hold, names = login.folder / "hold", [f"run-{number}" for number in range(asked.num_runs)]
    hold.touch()
    steps = f"train.max_steps={asked.steps}"
    words = ["submit", "digits.yaml", "name=undisturbed", "--cluster", "local", "--wait", *COMMON, *world(1, 2), steps]
    undisturbed = cluster.popen(sys.executable, "-m", "ddp_hpc", *words, cwd=login.folder)
    waiters = {}
    for number, name in enumerate(names):
        settings = [
            *COMMON,
            *LAYOUTS[number % len(LAYOUTS)],
            steps,
            "slurm.partition=low",
            f"recipe.args.slow_while={hold}",
        ]
        login.submit(name, *settings)
        waiters[name] = _wait_for(cluster, login, name, settings)
    stdout, stderr = undisturbed.communicate(timeout=900)
    assert undisturbed.returncode == 0, stdout + stderr
    cluster.wait_for(lambda: all(Ledger.read(login.run(name)).attempts for name in names), 180)

    weather = Weather(cluster, login, names, say)
    began = time.monotonic()
    weather.blow(asked.faults)
    weather.clear_up()
    hold.unlink()
    say(f"{time.monotonic() - began:4.0f} s the storm is over; the runs are left to themselves")
    states, released = _await_ends(cluster, login, names, say)

    runs = {name: _judge(cluster, login, name, states[name], weather) for name in names}
    for name, problem in _problems_of(waiters, states).items():
        runs[name]["problems"].append(problem)
    for name, times in released.items():
        runs[name]["released"] = times
    return {
        "seed": asked.seed,
        "minutes": asked.minutes,
        "verdict": "FAIL" if any(run["problems"] for run in runs.values()) else "PASS",
        "faults": dict(Counter(one.kind for one in weather.done if one.was_made)),
        "runs": runs,
        **stamp(),
        "slurm": cluster.run("sinfo", "--version").stdout.split()[-1],
        "what": [one.as_json() for one in weather.done],
    }


def _wait_for(cluster: Cluster, login: LoginNode, name: str, settings: Sequence[str]) -> subprocess.Popen[str]:
    """Start what a user leaves running on the login node, in tmux."""
    words = ["submit", "digits.yaml", f"name={name}", "--cluster", "slurm", *settings, "--wait"]
    return cluster.popen(sys.executable, "-m", "ddp_hpc", *words, cwd=login.folder)


def _problems_of(waiters: Mapping[str, subprocess.Popen[str]], states: Mapping[str, str]) -> dict[str, str]:
    """Return, of each run, what became of who waited for it, where that is not that it saw the run finish."""
    problems = {}
    for name, waiter in waiters.items():
        if states[name] != "finished":
            continue  # it still waits, as it should; the cluster's end is its own
        try:
            stdout, stderr = waiter.communicate(timeout=WAITER_S)
        except subprocess.TimeoutExpired:
            problems[name] = f"`submit --wait` does not see within {WAITER_S:.0f} s that it has finished"
            continue
        if states[name] == "finished" and waiter.returncode:
            problems[name] = f"`submit --wait` ended with {waiter.returncode}: {(stdout + stderr)[-1500:]}"
    return problems


def _await_ends(
    cluster: Cluster, login: LoginNode, names: Sequence[str], say: Say
) -> tuple[dict[str, str], Counter[str]]:
    """Return how each run stands in the end: `finished`, or why it is waited for no longer; and how often each was released."""
    states: dict[str, str] = {}
    released: Counter[str] = Counter()
    seen = {name: (_standing(login.run(name)), time.monotonic()) for name in names}
    has_job_at = dict.fromkeys(names, time.monotonic())
    while len(states) < len(names):
        queue = cluster.run("squeue", "--noheader", "--format=%j %i %T %r", check=False).stdout
        for name in (name for name in names if name not in states):
            run, now = login.run(name), time.monotonic()
            standing = _standing(run)
            if standing != seen[name][0]:
                seen[name] = (standing, now)
            line = next((one for one in queue.splitlines() if one.split()[0].endswith(name)), "")
            has_job_at[name] = now if line else has_job_at[name]
            if line.endswith(HELD):
                released[name] += 1
                say(f"{name}: its user releases it ({HELD})")
                cluster.run(sys.executable, "-m", "ddp_hpc", "requeue", name, "--now", cwd=login.folder, check=False)
            if _has_finished(run):
                states[name] = "finished"
            elif now - has_job_at[name] > GONE_S:
                states[name] = f"has no job any more, at {_told(run)}"
            elif now - seen[name][1] > STILL_S:
                states[name] = f"stands still for {STILL_S:.0f} s, at {_told(run)}, job: {line}"
            if name in states:
                say(f"{name}: {states[name]}")
        time.sleep(LOOK_S)
    return states, released


def _has_finished(run: RunDir) -> bool:
    attempts = Ledger.read(run).attempts
    return run.done.exists() and attempts[-1].ended_at is not None


def _standing(run: RunDir) -> tuple[object, ...]:
    """Return what changes while anything happens."""
    progress = read_progress(run)
    ended = [attempt.ended_at for attempt in Ledger.read(run).attempts]
    return len(ended), ended[-1:], max(committed_steps(run), default=0), progress and progress.step


def _told(run: RunDir) -> str:
    newest = Ledger.read(run).newest
    attempt = "no attempt" if newest is None else f"attempt {newest.attempt} ({newest.cause}: {newest.reason[:200]})"
    return f"step {max(committed_steps(run), default=0)}, {attempt}"


def _judge(cluster: Cluster, login: LoginNode, name: str, state: str, weather: Weather) -> dict[str, Any]:
    run, undisturbed = login.run(name), login.run("undisturbed")
    problems = [] if state == "finished" else [state]
    if state == "finished":
        if login.digest(name) != login.digest("undisturbed"):
            problems.append("other bits than the undisturbed run's")
        left = _processes_left(cluster, run)
        problems += [f"left behind on {where}" for where in left]
        if not left and not _is_free(run):
            problems.append("run.lock is held, though no process of the run is left")
        problems += problems_of(run, undisturbed, weather.done)
    attempts = Ledger.read(run).attempts
    return {
        "state": state.split(",", maxsplit=1)[0],
        "problems": problems,
        "attempts": len(attempts),
        "ends": dict(Counter(map(_end_of, attempts))),
        "steps_taken_again": read_steps_taken(run).num_repeated,
    }


def _end_of(attempt: Attempt) -> str:
    return f"{attempt.cause or 'none'}{f' -> {attempt.next}' if attempt.next else ''}"


def _processes_left(cluster: Cluster, run: RunDir, patience_s: float = 30.0) -> list[str]:
    """Return the processes of a run that do not go away, with the node of each."""
    until = time.monotonic() + patience_s
    while True:
        found = []
        for node in cluster.settings.hostnames:
            argv = ["pgrep", "--list-full", "--full", f"{run.path}( |/|$)"]
            lines = cluster.run(*argv, node=node, user="root", check=False).stdout.splitlines()
            found += [f"{node}: {line[:200]}" for line in lines if "pgrep" not in line]
        if not found or time.monotonic() > until:
            return found
        time.sleep(1)


def _is_free(run: RunDir) -> bool:
    fd = processes.take_lock(run.lock)
    if fd is None:
        return False
    os.close(fd)
    return True
