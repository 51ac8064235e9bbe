"""Starts a script in a child process, with what torchrun would give it."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from ddp_hpc.base import exit_codes, processes
from ddp_hpc.cluster.rank_probe.folder import socket_of
from ddp_hpc.cluster.rank_probe.server import serve_at_rendezvous
from ddp_hpc.cluster.rendezvous.worker_env import (
    HOSTED_STORE_VARIABLES,
    PROBE_FOLDER,
    attach_variables,
    torchrun_variables,
    with_undo_record,
)
from ddp_hpc.cluster.slurm.allocation import is_in_job
from ddp_hpc.job.script.interpreter import run_as_main
from ddp_hpc.job.script.plan import ScriptRank, users_python_path
from ddp_hpc.job.script.script_end import report_exception
from ddp_hpc.job.script.sealed_objects import seal_at_rendezvous
from ddp_hpc.run.run_dir.records import read_rendezvous_token

_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
"""Exit codes of shells for a program that they cannot start."""
_NO_STACKS_NOTE = "a hang is reported without the ranks' stacks and collectives, because "
_NO_SEAL_NOTE = (
    "the Python objects that this script's ranks send each other carry no seal, because ddp-hpc does not know how this PyTorch "
    "pickles them: another user who reaches the ranks' port may run code as you (docs/security.md)"
)


def start_script(
    script_rank: ScriptRank, environ: Mapping[str, str], log_fd: int, listen_fd: int | None, *, is_hosted: bool
) -> int:
    """Start the script in a child process; return its process id."""
    given = _script_environ(script_rank, environ, is_hosted=is_hosted)
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = exit_codes.FAILED
        try:
            os.dup2(log_fd, 1)
            os.dup2(log_fd, 2)
            if listen_fd is not None:
                os.close(listen_fd)
            processes.reset_signals_in_child(
                parent, is_new_program=bool(script_rank.plan.why_exec), ignores=_signals_to_ignore(script_rank, given)
            )
            code = _exec_script(script_rank, given) if script_rank.plan.why_exec else _run_in_fork(script_rank, given)
        except BaseException as error:  # noqa: BLE001  nothing may return into this process's own code
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            with suppress(Exception):  # a script may put anything there
                sys.stderr.flush()
            os._exit(code)
    return pid


def _script_environ(script_rank: ScriptRank, environ: Mapping[str, str], *, is_hosted: bool) -> dict[str, str]:
    contract = torchrun_variables(
        environ,
        attempt=script_rank.attempt,
        max_restarts=script_rank.spec.restart.max_no_progress,
        run_id=script_rank.run.name,
        error_file=str(script_rank.run.torch_error(script_rank.attempt, script_rank.rank)),
    )
    script = script_rank.spec.script
    attached = attach_variables(
        script_rank.run.path.absolute(),
        attempt=script_rank.attempt,
        stop_signal=script.stop_signal,
        stop_exit_code=next(iter(script.resume_exit_codes), 0),
    )
    path = os.pathsep.join(users_python_path(environ, script_rank.run.code_copies))
    others = {name: value for name, value in environ.items() if name not in {"PYTHONPATH", *HOSTED_STORE_VARIABLES}}
    ours = {**({"PYTHONPATH": path} if path else {}), **contract, **(HOSTED_STORE_VARIABLES if is_hosted else {})}
    return {"PYTHONUNBUFFERED": "1", **others, **with_undo_record(ours, environ), **attached}


def _signals_to_ignore(script_rank: ScriptRank, environ: Mapping[str, str]) -> list[int]:
    """Return the signals that mean nothing to the script, and would kill it where Slurm sends them to all processes."""
    # Slurm signals every process of a step unless it tracks them by cgroups (ProctrackType in slurm.conf). SIGUSR2 is what
    # ddp-hpc asks it for, and srun; a user may send the others. The script gets its own signal then, from this process.
    names = {"USR1", "USR2", "HUP"} - {script_rank.spec.script.stop_signal}
    return [processes.signal_number(name) for name in names] if is_in_job(environ) else []


def _exec_script(script_rank: ScriptRank, environ: Mapping[str, str]) -> int:
    try:
        os.execve(script_rank.plan.executable, script_rank.plan.new_process_command, {**environ})  # noqa: S606  it is what the user asks for
    except OSError as error:
        text = f"{script_rank.plan.executable} cannot be executed: {error.strerror}"
        hint = ". Its first line must name the program that reads it, such as `#!/bin/bash`"
        os.write(2, f"error: {text}{hint if error.errno == errno.ENOEXEC else ''}\n".encode())
        return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE


def _run_in_fork(script_rank: ScriptRank, environ: Mapping[str, str]) -> int:
    is_noted = script_rank.rank == 0
    if folder := environ.get(PROBE_FOLDER):
        serve_at_rendezvous(
            socket_of(Path(folder), script_rank.rank),
            num_ranks=int(environ.get("LOCAL_WORLD_SIZE", "1")),
            on_refusal=partial(_log_note, _NO_STACKS_NOTE) if is_noted else lambda _: None,
        )
    given = environ
    if environ["WORLD_SIZE"] != "1" or HOSTED_STORE_VARIABLES.items() <= environ.items():
        is_asked = seal_at_rendezvous(
            environ,
            lambda: read_rendezvous_token(script_rank.run.rendezvous_token(script_rank.attempt)),
            on_refusal=partial(_log_note, _NO_SEAL_NOTE) if is_noted else lambda: None,
        )
        if is_asked and script_rank.plan.sets_endpoint:  # processes that it spawns ask only their variables
            given = {**environ, **dict.fromkeys(HOSTED_STORE_VARIABLES, "False")}
    return run_as_main(
        script_rank.plan,
        given,
        users_python_path(environ, script_rank.run.code_copies),
        partial(report_exception, script_rank),
    )


def _log_note(text: str, why_not: str = "") -> None:
    with suppress(OSError):
        os.write(2, f"note: {text}{why_not}\n".encode())
