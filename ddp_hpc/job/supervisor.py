"""The supervisor of one attempt: takes the run, starts the agent, waits, and writes down how it ended.

python -m ddp_hpc.job.supervisor RUN_DIR
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_hpc import exit_codes, processes
from ddp_hpc.config import load_resolved
from ddp_hpc.durable import replace_text
from ddp_hpc.job.launcher import agent_argv
from ddp_hpc.records import Ending, first_failure, read_attempts, record_end, record_start
from ddp_hpc.run_dir import RunDir

LOCK_PATIENCE_S = 10.0
"""How long the processes of a killed attempt may take to vanish."""

ENDINGS: Mapping[int, Ending] = {
    exit_codes.FINISHED: "finished",
    exit_codes.STOPPED: "stopped",
    exit_codes.REFUSED: "refused",
}
"""How an attempt ended, by the agent's exit code; every other code is a failure."""


def main(argv: Sequence[str] | None = None) -> int:
    """Supervise one attempt; return its exit code."""
    parser = argparse.ArgumentParser(prog="ddp_hpc.job.supervisor", description=__doc__)
    parser.add_argument("run")
    run = RunDir(Path(parser.parse_args(argv).run))
    processes.block_awaited_signals()
    lock_fd = processes.take_lock(run.lock, patience_s=LOCK_PATIENCE_S)
    if lock_fd is None:
        sys.stderr.write(f"error: {run.path} is being worked on by another process.\n")
        return exit_codes.REFUSED
    return _supervise(run, lock_fd)


def _supervise(run: RunDir, lock_fd: int) -> int:
    attempt = len(read_attempts(run))
    run.stop_request.unlink(missing_ok=True)
    record_start(run, attempt=attempt, job_id=str(os.getpid()))
    spec = load_resolved(run.config)
    code = _run_agent(agent_argv(spec, run, attempt=attempt), lock_fd)
    ending = ENDINGS.get(code, "failed")
    if ending == "finished":
        done = {"epochs": spec.train.epochs, "max_steps": spec.train.max_steps, "at": time.time()}
        replace_text(run.done, json.dumps(done))
    record_end(run, attempt=attempt, ending=ending, exit_code=code, reason=_reason(run, attempt, ending, code))
    return code if ending != "failed" else exit_codes.FAILED


def _run_agent(argv: Sequence[str], lock_fd: int) -> int:
    """Run the agent to its end, passing stop signals on; return its exit code."""
    agent = subprocess.Popen(argv, pass_fds=[lock_fd], stdin=subprocess.DEVNULL)
    while True:
        number = processes.await_signal(3600.0)
        if number in processes.STOP_SIGNALS:
            processes.send([agent.pid], number)
        code = agent.poll()
        if code is not None:
            return code


def _reason(run: RunDir, attempt: int, ending: Ending, code: int) -> str:
    if ending in ("finished", "stopped"):
        return ""
    failure = first_failure(run, attempt)
    if failure is not None:
        is_plain = failure.is_input_error or failure.rank < 0
        return failure.exception if is_plain else f"rank {failure.rank}: {failure.exception}"
    return f"the agent was killed by signal {-code}" if code < 0 else f"the agent ended with code {code}"


if __name__ == "__main__":
    sys.exit(main())
