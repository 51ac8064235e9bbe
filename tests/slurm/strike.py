"""Runs on a node of the cluster: signals the last rank of a run's script there, once the run's files have changed and are whole.

A test that looked from outside would come too late: an example's steps take some milliseconds.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import psutil

AGENT = "ddp_hpc.job.node.agent"
Files = dict[str, tuple[int, int]]


def look(folder: Path, pattern: str) -> Files:
    """Return the files of a pattern, with when they have changed and how long they are."""
    found = {}
    for path in folder.glob(pattern):
        try:
            about = path.stat()
        except FileNotFoundError:
            continue  # an older one, deleted just now
        found[str(path)] = (about.st_mtime_ns, about.st_size)
    return found


def await_change(folder: Path, pattern: str, settle_s: float) -> None:
    """Return once files have changed, and not again for some seconds."""
    at_first = seen = look(folder, pattern)
    since = time.monotonic()
    while seen == at_first or time.monotonic() - since < settle_s:
        time.sleep(0.005)
        now = look(folder, pattern)
        if now != seen:
            seen, since = now, time.monotonic()


def scripts(run: str) -> list[psutil.Process]:
    """Return the processes of the ranks' scripts on this node: an agent's workers have one child each."""
    of_run = [one for one in psutil.process_iter(["cmdline"]) if _names_agent(one.info["cmdline"] or [], run)]
    # Workers and scripts are forks of an agent, with its command line.
    agents = [one for one in of_run if one.ppid() not in {other.pid for other in of_run}]
    return [script for agent in agents for worker in agent.children() for script in worker.children()]


def _names_agent(words: list[str], run: str) -> bool:
    return AGENT in words and run in words and not words[0].endswith("srun")


def main(run: str, name: str, *change: str) -> None:
    if change:
        folder, pattern, settle_s = change
        await_change(Path(folder), pattern, float(settle_s))
    found = scripts(run)
    if found:
        found[-1].send_signal(signal.Signals[f"SIG{name}"])
        sys.stdout.write(f"{name} to {found[-1].pid}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
