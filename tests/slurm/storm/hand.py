"""Finds a process of a run on a node and sends it a signal: what the storm starts there, as root.

    python hand.py RUN_DIR JOB_ID kill rank 0.4
    python hand.py wake PID START

It prints which process it was (pid and start time) as JSON, or `null` where the node has none.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from ddp_hpc.prove.drill.injector import NodeProcess, list_processes, pids_by_kind

SUPERVISOR = "ddp_hpc.job.supervisor"
SIGNALS = {"kill": signal.SIGKILL, "pause": signal.SIGSTOP, "freeze": signal.SIGSTOP}


def processes_of(seen: Sequence[NodeProcess], run_path: str, job_id: str) -> Mapping[str, list[int]]:
    """Return the processes of a run by what they are."""
    found = pids_by_kind(seen, run_path)
    ours = [one for one in seen if run_path in one.argv]
    loaders = [one for one in ours if one.parent in found["worker"]]
    shells = [one for one in seen if any(Path(word).parent.name == f"job{int(job_id):05d}" for word in one.argv)]
    return {
        "rank": found["worker"],
        "agent": found["agent"],
        "srun": found["srun"],
        "loader": sorted(one.pid for one in loaders),
        "supervisor": sorted(one.pid for one in ours if one.module == SUPERVISOR),
        "shell": sorted(one.pid for one in shells if Path(one.argv[0]).name == "bash"),
    }


def send(pid: int, number: signal.Signals) -> float | None:
    """Send a signal; return when the process had started, or nothing where it is gone."""
    try:
        start = psutil.Process(pid).create_time()
        os.kill(pid, number)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return None
    return start


def wake(pid: int, start: float) -> None:
    """Let the process that was stopped go on; let another one of its number be."""
    try:
        if psutil.Process(pid).create_time() == start:
            os.kill(pid, signal.SIGCONT)
    except (psutil.NoSuchProcess, ProcessLookupError):
        pass


def main(words: Sequence[str]) -> None:
    """Do as told."""
    if words[0] == "wake":
        wake(int(words[1]), float(words[2]))
        return
    run_path, job_id, deed, kind, chance = words
    seen = [one for one in list_processes() if one.argv]
    pids = processes_of(seen, run_path, job_id)[kind]
    done = None
    if pids:
        pid = pids[int(float(chance) * len(pids))]
        start = send(pid, SIGNALS[deed])
        done = None if start is None else {"pid": pid, "start": start}
    sys.stdout.write(json.dumps(done) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
