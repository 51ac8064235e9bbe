"""The commands that a supervisor starts."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ddp_hpc.base import processes
from ddp_hpc.cluster.slurm.framing import read_answers
from ddp_hpc.cluster.slurm.steps import probe_on_argv

_POLL_INTERVAL_S = 0.5
"""How long to wait between two questions whether a command is over."""
_LAUNCH_FAILED_PATTERN = re.compile(r"launch .*failed on node ([^\s:]+)")
"""As in `srun: error: Task launch for StepId=7.0 failed on node node3: Communication connection failure`."""


def start_command(argv: Sequence[str], lock_fds: Sequence[int], *, on_line: bool = False) -> subprocess.Popen[bytes]:
    """Start a command that inherits the run's lock; with `on_line`, its standard input and output are pipes to us."""
    # The kernel sends the command SIGTERM when this process dies, even by SIGKILL (prctl(2), PR_SET_PDEATHSIG): srun then
    # ends its job step, which otherwise would keep running on all nodes.
    pipe = subprocess.PIPE if on_line else None
    return subprocess.Popen(
        argv,
        pass_fds=lock_fds,
        stdin=pipe or subprocess.DEVNULL,
        stdout=pipe,
        preexec_fn=partial(processes.terminate_with_parent, os.getpid()),  # noqa: PLW1509  there are no threads here
    )


def run_for_out_and_err(
    argv: Sequence[str], *, environ: Mapping[str, str], timeout_s: float, is_over: Callable[[], bool] = lambda: False
) -> tuple[str, str]:
    """Run a short command; return what it printed, and its errors, as far as it printed them within `timeout_s` and before `is_over`.

    Bytes that are no UTF-8 are replaced: a node's login scripts may print anything.
    """
    until = time.monotonic() + timeout_s
    try:
        process = subprocess.Popen(
            argv, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except OSError as error:
        return "", str(error)
    with process:
        while True:
            try:
                printed, errors = process.communicate(timeout=max(min(until - time.monotonic(), _POLL_INTERVAL_S), 0.0))
            except subprocess.TimeoutExpired as error:
                if time.monotonic() < until and not is_over():
                    continue
                process.kill()
                process.wait()  # not for the end of its output, which a process that it left behind may hold open
                return _decode(error.stdout), f"{_decode(error.stderr)}\n{argv[0]} did not end within {timeout_s:.0f} s"
            return _decode(printed), _decode(errors)


def _decode(printed: bytes | None) -> str:
    return (printed or b"").decode(errors="replace")


@dataclass(frozen=True, kw_only=True)
class NodesAnswers:
    """What the nodes of a job answered to one question."""

    by_node: Mapping[str, Any]
    """Of those that did, in the job's order."""
    silent: Sequence[str]
    """Names of those that did not."""
    unstarted: Sequence[str] = ()
    """Those of them on which srun could not start the command; some seconds later it ends the command on the others, too."""
    last_error: str = ""
    """The last line of srun's errors."""


def ask_nodes(  # noqa: PLR0913  a command, and how it is run
    command: Sequence[str],
    nodes: Sequence[str],
    *,
    environ: Mapping[str, str],
    timeout_s: float,
    is_all_or_none: bool = False,
    step: Sequence[str] | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> NodesAnswers:
    """Run a ddp_hpc module once on every node; `--mark` tells its answer from other output (`slurm.framing`).

    `step` is the beginning of the command that starts it there; without it, a step of one CPU.
    """
    mark = secrets.token_hex(8)
    begin = probe_on_argv(nodes, is_all_or_none=is_all_or_none) if step is None else step
    argv = [*begin, *command, f"--mark={mark}"]
    printed, errors = run_for_out_and_err(argv, environ=environ, timeout_s=timeout_s, is_over=is_over)
    answers = read_answers(printed, mark)
    return NodesAnswers(
        by_node={node: answers[node] for node in nodes if node in answers},
        silent=[node for node in nodes if node not in answers],
        unstarted=[node for node in nodes if node not in answers and node in _LAUNCH_FAILED_PATTERN.findall(errors)],
        last_error=next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), ""),
    )
