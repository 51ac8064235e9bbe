"""One worker of a run that runs a user's script: starts the script as a child process, and watches over it until it ends.

The script is a process of its own, so that whatever it does at its end (`os._exit`, a crash in C++, a signal) is seen and
written down here, under every launcher. This process passes the stop signal on to the script alone, looks for signs of life,
counts its saves, and hosts the store at which the ranks meet.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import psutil

from ddp_hpc import exit_codes
from ddp_hpc.base import processes
from ddp_hpc.base.durable import make_directories, read_json
from ddp_hpc.base.patience import known, patiently
from ddp_hpc.checkpoints.checkpoint_names import committed_steps
from ddp_hpc.config import load_resolved
from ddp_hpc.errors import UnreadableError, exit_code_of
from ddp_hpc.rendezvous.worker_env import STORE_IS_HOSTED, contract_of_torchrun, for_attach
from ddp_hpc.run_dir.failure_reports import (
    WorkerFailure,
    failure_of,
    read_failures,
    report,
    report_killed,
    write_failure,
)
from ddp_hpc.run_dir.ownership import is_fenced
from ddp_hpc.run_dir.paths import RunDir
from ddp_hpc.run_dir.records import Progress, with_report, write_progress, write_remark
from ddp_hpc.script.ending import is_of_stop_signal, meaning
from ddp_hpc.script.interpreter import run_as_main
from ddp_hpc.script.life import Life
from ddp_hpc.script.output import Echo, open_log, redirect
from ddp_hpc.script.plan import Plan, frozen_code, plan_of, users_python_path
from ddp_hpc.slurm.allocation import is_in_job
from ddp_hpc.spec import RunSpec
from ddp_hpc.workload.script_progress import Seen, look, read_seen, record_changes

MODULES = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
)
"""What most scripts import; the agent imports it once for all of its workers."""
COMPILER = "torch._dynamo"
"""As large as the rest of PyTorch. Optimizers and DDP import it when they are made, only to say what it must not compile."""
ECHO_S = 0.25
"""How often rank zero's output is copied to the console."""
STOP_LOOK_S = 1.0
"""How often to look for a user's request to stop."""
LEFTOVERS_S = 2.0
"""How long helper processes of Python may take to exit after the script has (the resource tracker of `multiprocessing`)."""
SIGNAL_S = 2.0
"""How long after a script this process may receive the signal that Slurm has sent to both."""
SHORT_S = 5.0
"""A script that takes no longer has perhaps not trained."""
LONGEST_LOOK_S = 10.0
"""The longest time between two checks of a script."""
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
"""Exit codes of shells for a program that they cannot start."""
_why_exec = ""
"""Why `preload` has found that scripts must not be forked from this process, beyond what the script's source says."""


def preload(run_path: str) -> str:
    """Import what most scripts import, unless they start as new processes; workers may be forked in any case.

    Raises:
        ConfigError: where there is no such script, or it cannot be executed.
    """
    global _why_exec  # noqa: PLW0603  a fork hands it on to the workers
    run = RunDir(Path(run_path))
    spec = load_resolved(run.config, is_patient=True)
    plan = _plan(run, spec, os.environ)
    if not plan.why_exec:
        for name in [*MODULES, *([COMPILER] if plan.may_compile else []), *spec.script.preload]:
            if name in spec.script.preload or find_spec(name.partition(".")[0]) is not None:
                import_module(name)
        if "torch" in sys.modules:
            # By its name, because only `train` may import PyTorch. Where a script compiles after all, its process imports
            # the compiler itself, as it would without an agent.
            import_module("ddp_hpc.train.late_compiler").import_compiler_late()
        _why_exec = _what_a_fork_would_lose()
    return ""


def _what_a_fork_would_lose() -> str:
    """Return what a forked process would not have of this one: threads, and CUDA."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "importing the modules of `script.preload` initialised CUDA, which a forked process cannot use"
    names = processes.lasting_threads()
    left = ", ".join(sorted(set(names)))
    return (
        f"importing PyTorch and `script.preload` left threads running, which a fork would lose ({left})"
        if names
        else ""
    )


def _plan(run: RunDir, spec: RunSpec, environ: Mapping[str, str]) -> Plan:
    code = frozen_code(environ, [run.snapshot, run.snapshots])
    return plan_of(spec.script, code, environ, Path.cwd())


def main(run_path: str, environ: Mapping[str, str], *, attempt: int, listen_fd: int | None = None) -> int:
    """Run the script to its end; return what that means, as one of `exit_codes`."""
    run, rank = RunDir(Path(run_path)), int(environ["RANK"])
    log = run.rank_log(attempt, rank)
    try:
        log_fd = open_log(log)  # stop signals are blocked, and `_see_through` takes them
        spec = load_resolved(run.config, is_patient=True)
        plan = _plan(run, spec, environ)
        plan = replace(plan, why_exec=plan.why_exec or _why_exec)
        if plan.why_exec and rank == 0:
            sys.stderr.write(f"note: the script starts as a new process on each rank, because {plan.why_exec}\n")
        worker = _Worker(run=run, spec=spec, plan=plan, rank=rank, attempt=attempt)
        return worker.run_script(environ, log_fd, listen_fd)
    except BaseException as error:  # noqa: BLE001  whatever ends a worker is recorded
        report(run.rank_error(attempt, rank), error, rank=rank, log=log)
        return exit_code_of(error)


@dataclass(frozen=True, kw_only=True)
class _Worker:
    """One rank of one attempt."""

    run: RunDir
    spec: RunSpec
    plan: Plan
    rank: int
    attempt: int

    @property
    def log(self) -> Path:
        return self.run.rank_log(self.attempt, self.rank)

    def run_script(self, environ: Mapping[str, str], log_fd: int, listen_fd: int | None) -> int:
        """Start the script, and wait for its end."""
        processes.show_as_listening()
        processes.adopt_orphans()  # so that processes that the script leaves behind are found
        seen = patiently(str(self.run.script_progress), lambda: read_seen(self.run))
        watcher = _Watcher(worker=self, seen=seen, echo=Echo(self.log) if self.rank == 0 else None)
        watcher.count_saves()  # of the attempts before: what this one adds is counted from there
        # A worker that is alone may have no socket. Then its script hosts the store, unless torchrun does.
        has_store = listen_fd is not None or environ["WORLD_SIZE"] != "1" or STORE_IS_HOSTED.items() <= environ.items()
        is_hosted = has_store and find_spec("torch") is not None
        pid = self._start(self._environ(environ, is_hosted=is_hosted), log_fd, listen_fd)
        os.close(log_fd)
        # After the fork, because the store has threads. The socket listens already: ranks that connect meanwhile wait.
        store = _host_store(environ, listen_fd) if is_hosted and listen_fd is not None else None
        if listen_fd is not None and store is None:
            os.close(listen_fd)  # the script listens there itself
        began = time.monotonic()
        code = watcher.see_through(pid)
        ran_s = time.monotonic() - began
        means = meaning(
            code,
            stop_signal=watcher.sent_signal,
            resume_codes=self.spec.script.resume_exit_codes,
        )
        if means == exit_codes.STOPPED and watcher.was_stopped_for_failure:
            means = exit_codes.FAILED  # the rank that has failed has written why
        elif means == exit_codes.FAILED and is_fenced(self.run, self.attempt):
            # `attach` has ended the script, or it could not write: a newer attempt has the run.
            means = exit_codes.FENCED
        elif means == exit_codes.FAILED:
            self._report(code, was_killed=watcher.has_killed)
        if code in self.spec.script.resume_exit_codes and watcher.sent_signal is None:
            with suppress(OSError):  # without it, the supervisor takes the code for the answer to a signal
                self.run.script_asked(self.attempt, self.rank).touch()
        left = self._care_for_leftovers(has_finished=means == exit_codes.FINISHED)
        if self.rank != 0:
            with suppress(OSError):
                self.run.script_ended(self.attempt, self.rank).touch()
        elif store is not None and means in exit_codes.GOOD:
            self._keep_store(environ)
        if means == exit_codes.FINISHED:
            self._remark([self._what_was_short(watcher.seen, ran_s), left])
        return means

    def _keep_store(self, environ: Mapping[str, str]) -> None:
        """Wait while scripts of other ranks are connected to the store, which ends with this process."""
        # A process that a script has left behind may have inherited its connection, so the end of all scripts counts, too.
        others = range(1, int(environ["WORLD_SIZE"]))
        while _is_store_used(int(environ["MASTER_PORT"])):
            signs = (self.run.script_ended(self.attempt, rank) for rank in others)
            if all(known(sign, sign.exists, unknown=False) for sign in signs):
                return
            processes.await_signal(ECHO_S)  # the others get a stop signal themselves

    def _what_was_short(self, seen: Seen, ran_s: float) -> str:
        """Return why a user may doubt that a script that has finished has trained; rank zero does that for all."""
        pattern = self.spec.script.progress
        if self.rank != 0 or seen.num_changes or self._may_have_committed():
            return ""
        exited = f"the script exited with code 0 after {'less than a second' if ran_s < 1 else f'{ran_s:.0f} s'}"
        if pattern is not None:
            return f"{exited} and saved no file of `script.progress` ({pattern!r})"
        return exited if ran_s < SHORT_S else ""

    def _may_have_committed(self) -> bool:
        try:
            return bool(committed_steps(self.run))
        except UnreadableError:
            return True

    def _remark(self, remarks: Iterable[str]) -> None:
        text = "; ".join(filter(None, remarks))
        if text:
            with suppress(OSError):  # it is in the log, too, or not worth a failure
                write_remark(self.run, self.attempt, self.rank, text)

    def _environ(self, environ: Mapping[str, str], *, is_hosted: bool) -> dict[str, str]:
        contract = contract_of_torchrun(
            environ,
            attempt=self.attempt,
            max_restarts=self.spec.restart.max_no_progress,
            run_id=self.run.name,
            error_file=str(self.run.torch_error(self.attempt, self.rank)),
        )
        script = self.spec.script
        attached = for_attach(
            self.run.path.absolute(),
            attempt=self.attempt,
            stop_signal=script.stop_signal,
            stop_exit_code=next(iter(script.resume_exit_codes), 0),
        )
        path = os.pathsep.join(users_python_path(environ))
        others = {name: value for name, value in environ.items() if name != "PYTHONPATH"}
        return {
            "PYTHONUNBUFFERED": "1",
            **others,
            **({"PYTHONPATH": path} if path else {}),
            **contract,
            **attached,
            **(STORE_IS_HOSTED if is_hosted else {}),
        }

    def _not_for_script(self, environ: Mapping[str, str]) -> list[int]:
        """Return the signals that mean nothing to the script, and would kill it where Slurm sends them to all processes."""
        # Slurm signals every process of a step unless it tracks them by cgroups (ProctrackType in slurm.conf). SIGUSR2 is what
        # ddp-hpc asks it for, and srun; a user may send the others. The script gets its own signal then, from this process.
        names = {"USR1", "USR2", "HUP"} - {self.spec.script.stop_signal}
        return [processes.signal_number(name) for name in names] if is_in_job(environ) else []

    def _start(self, environ: Mapping[str, str], log_fd: int, listen_fd: int | None) -> int:
        """Start the script in a child process; return its process id."""
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            code = exit_codes.FAILED
            try:
                redirect(log_fd)
                if listen_fd is not None:
                    os.close(listen_fd)
                processes.become_script(
                    parent, is_new_program=bool(self.plan.why_exec), ignores=self._not_for_script(environ)
                )
                code = self._exec(environ) if self.plan.why_exec else self._run_here(environ)
            except BaseException as error:  # noqa: BLE001  nothing may return into this process's own code
                sys.excepthook(type(error), error, error.__traceback__)
            finally:
                with suppress(OSError, ValueError):
                    sys.stderr.flush()
                os._exit(code)
        return pid

    def _exec(self, environ: Mapping[str, str]) -> int:
        try:
            os.execve(self.plan.executable, self.plan.command_of_process, {**environ})  # noqa: S606  it is what the user asks for
        except OSError as error:
            text = f"{self.plan.executable} cannot be executed: {error.strerror}"
            hint = ". Its first line must name the program that reads it, such as `#!/bin/bash`"
            os.write(2, f"error: {text}{hint if error.errno == errno.ENOEXEC else ''}\n".encode())
            return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE

    def _run_here(self, environ: Mapping[str, str]) -> int:
        return run_as_main(self.plan, environ, users_python_path(environ), self._report_exception)

    def _report_exception(self, error: BaseException) -> None:
        """Write the error report of an exception that ends the script; called in the script's process."""
        failure = failure_of(error, rank=self.rank, log=self.log, phase="training")
        with suppress(OSError):
            write_failure(
                self.run.rank_error(self.attempt, self.rank),
                replace(failure, is_secondary=_lost_connection(failure.exception), of_script=True),
            )

    def _report(self, code: int, *, was_killed: bool) -> None:
        """Write the error report of a script that has ended badly, if its own process has written none."""
        path = self.run.rank_error(self.attempt, self.rank)
        if path.exists():
            return
        if code < 0 and not was_killed:
            report_killed(path, processes.signal_of(-code), rank=self.rank, log=self.log)
            return
        text = _of_elastic(self.run.torch_error(self.attempt, self.rank)) or _last_line(self.log)
        how = (
            f"the script did not exit within {self.spec.script.stop_within_s} s after SIG{self.spec.script.stop_signal} "
            "(`script.stop_within_s`), so ddp-hpc killed it"
            if was_killed
            else f"the script exited with code {code}"
        )
        failure = WorkerFailure(
            rank=self.rank,
            host=processes.host_name(),
            at=time.time(),
            step=0,
            exception=f"{how}; its last line: {text}" if text else f"{how} and printed nothing",
            log=str(self.log),
            is_secondary=_lost_connection(text),
            of_script=True,
            phase="training",
        )
        write_failure(path, failure)

    def _care_for_leftovers(self, *, has_finished: bool) -> str:
        """Kill what a script has left running that is to come back; return what one has left that has finished."""
        left = psutil.Process().children(recursive=True)
        if has_finished:
            _, left = psutil.wait_procs(left, timeout=LEFTOVERS_S)
        if not left:
            return ""
        if not has_finished:
            # They would hold ports, memory of GPUs and the lock of the run, which the next attempt needs.
            processes.kill(one.pid for one in left)
            return ""
        pids = ", ".join(str(one.pid) for one in left)
        remark = (
            f"rank {self.rank}'s script has finished, but processes that it started still run ({pids}); ddp-hpc does not wait for "
            "them, and does not restart them"
        )
        sys.stderr.write(f"note: {remark}\n")
        return remark


@dataclass(kw_only=True)
class _Watcher:
    """Waits for a script's end, and does meanwhile what has to be done beside it."""

    worker: _Worker
    seen: Seen
    echo: Echo | None
    sent_signal: int | None = None
    """The stop signal, once the script was sent it."""
    was_stopped_for_failure: bool = False
    """Whether the launcher stops this rank because another one has failed: srun and torchrun send SIGTERM then, too."""
    has_killed: bool = False
    interruptions: Sequence[int] = field(default_factory=processes.blocked_interruptions)
    _kill_at: float = float("inf")
    _looked_at: float = 0.0

    def see_through(self, pid: int) -> int:
        """Return the script's exit code, or minus the number of the signal that killed it."""
        [code] = self._await_end([pid])
        self._hear_of_stop(code)
        return self._stop_below(code)

    def _await_end(self, pids: Sequence[int]) -> list[int]:
        """Wait until these children have ended; return their exit codes."""
        spec = self.worker.spec
        interval_s = min(LONGEST_LOOK_S, max(1.0, spec.restart.hang_timeout_s / 10))
        life = Life(pid=pids[0], log=self.worker.log, interval_s=interval_s)
        self._note_life()
        patience_s = ECHO_S if self.echo else STOP_LOOK_S
        ended: dict[int, int] = {}
        while left := [pid for pid in pids if pid not in ended]:
            left_s = max(self._kill_at - time.monotonic(), 0.0)
            number = processes.await_signal(min(patience_s, left_s), self.interruptions)
            if self.sent_signal is None and (self._asks_to_stop(number) or self._is_stop_asked()):
                self.was_stopped_for_failure = number is not None and self._has_another_failed()
                self._ask_to_stop(left)
            if time.monotonic() >= self._kill_at:
                self.has_killed, self._kill_at = True, float("inf")
                processes.kill(left)
            ended.update(processes.reap())
            if self.echo:
                self.echo.copy()
            have_ended = ended.keys() >= {*pids}
            if have_ended or life.is_due():
                is_alive = life.look()
                if (
                    self.count_saves() or is_alive or have_ended
                ):  # at the end for what `attach` has reported since the last look
                    self._note_life()
        return [ended[pid] for pid in pids]

    def _stop_below(self, code: int) -> int:
        """Stop the training that a shell or a launcher has started, where the stop signal has ended that one.

        Return the exit code of all: of the first that has failed, or `code`.
        """
        script = self.worker.spec.script
        if self.worker.plan.program.python is not None or self.sent_signal is None:
            return code  # what a Python script leaves are its helpers
        if not is_of_stop_signal(code, self.sent_signal):
            return code
        self._kill_at = min(self._kill_at, time.monotonic() + script.stop_within_s)
        codes: list[int] = []
        while not self.has_killed and (adopted := _adopted()):
            # `tee` in `python train.py | tee log` ends with the training, which could not print any more without it.
            if asked := [pid for pid in adopted if not _reads_pipe(pid)]:
                processes.send(asked, processes.signal_number(script.stop_signal))
                codes += self._await_end(asked)
            else:
                self._await_end(adopted)
        failed = (one for one in codes if self._means(one) == exit_codes.FAILED)
        return next(failed, code)

    def _means(self, code: int) -> int:
        return meaning(code, stop_signal=self.sent_signal, resume_codes=self.worker.spec.script.resume_exit_codes)

    def _hear_of_stop(self, code: int) -> None:
        """Find out whether this process was sent a stop signal, too, where one has perhaps ended the script before."""
        # Slurm signals the processes of a step one after the other.
        may_have_obeyed = is_of_stop_signal(code) or code in self.worker.spec.script.resume_exit_codes
        ends_at = time.monotonic() + (SIGNAL_S if may_have_obeyed else 0.0)
        while self.sent_signal is None:
            left_s = max(ends_at - time.monotonic(), 0.0)
            number = processes.await_signal(left_s, self.interruptions)
            if number is not None and self._asks_to_stop(number):
                self.sent_signal = number
                self.was_stopped_for_failure = self._has_another_failed()
            elif not left_s:
                return

    def _asks_to_stop(self, number: int | None) -> bool:
        return number in {*processes.STOP_SIGNALS, *self.interruptions}

    def _has_another_failed(self) -> bool:
        """Tell whether a rank of this attempt has written an error report, which it does before it exits."""
        failures = read_failures(self.worker.run, self.worker.attempt)
        return any(not one.is_secondary and one.rank != self.worker.rank for one in failures)

    def _is_stop_asked(self) -> bool:
        """Look every second whether a user has asked the run to stop: `ddp-hpc stop` writes a file and sends no signal."""
        now = time.monotonic()
        if now - self._looked_at < STOP_LOOK_S:
            return False
        self._looked_at = now
        request = self.worker.run.stop_request
        return known(request, request.exists, unknown=False)

    def _ask_to_stop(self, pids: Iterable[int]) -> None:
        """Send the stop signal to the script's own process, and to no process that it has started."""
        # PyTorch's loader processes die of SIGTERM, so a script whose loaders get it cannot finish its step.
        script = self.worker.spec.script
        self.sent_signal = processes.signal_number(script.stop_signal)
        self._kill_at = time.monotonic() + script.stop_within_s
        processes.send(pids, self.sent_signal)

    def count_saves(self) -> bool:
        """Record that the script has saved its state, if it has; rank zero does that for all."""
        pattern = self.worker.spec.script.progress
        if pattern is None or self.worker.rank != 0:
            return False
        before = self.seen.num_changes
        with suppress(OSError):  # the file system does not answer now; the next look sees the change, too
            self.seen = record_changes(self.worker.run, self.seen, look(pattern, Path.cwd()))
        return self.seen.num_changes != before

    def _note_life(self) -> None:
        """Write what the supervisor takes for a sign of life."""
        run, attempt = self.worker.run, self.worker.attempt
        with suppress(OSError):
            if self.worker.rank == 0:
                newest = max((at for _, at in self.seen.files.values()), default=None)
                progress = Progress(
                    attempt=attempt,
                    saves=self.seen.num_changes,
                    last_checkpoint_at=None if newest is None else newest / 1e9,
                    at=time.time(),
                )
                write_progress(run, with_report(run, progress))
            else:
                sign = run.allowance(attempt)
                make_directories(sign.parent)
                sign.touch()


def _adopted() -> list[int]:
    """Return the running children of this process: once the script has ended, those whose parent was the script."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(child.pid)
    return found


def _reads_pipe(pid: int) -> bool:
    """Tell whether a process reads what another one prints; it then ends with that one."""
    with suppress(OSError):
        source = str(Path(f"/proc/{pid}/fd/0").readlink())
        return source.startswith("pipe:") and source != str(Path("/proc/self/fd/0").readlink())
    return False


def _host_store(environ: Mapping[str, str], listen_fd: int) -> object | None:
    """Host the store at which the ranks meet, as torchrun's agent does, so that its port is never free for others."""
    distributed = import_module("torch.distributed")
    open_store = partial(distributed.TCPStore, is_master=True, wait_for_workers=False, master_listen_fd=listen_fd)
    store: object = open_store(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]))
    return store


def _is_store_used(port: int) -> bool:
    """Tell whether another process is connected to the store at a port of this process, which is connected to it itself."""
    with suppress(psutil.Error, OSError):
        found = psutil.Process().net_connections("tcp")
        pairs = [(one.laddr, one.raddr) for one in found if one.status == psutil.CONN_ESTABLISHED and one.raddr]
        ours = {_address(here.ip, here.port) for here, there in pairs if there.port == port}
        return any(here.port == port and _address(there.ip, there.port) not in ours for here, there in pairs)
    return True  # perhaps; the others say when they end


def _address(ip: str, port: int) -> tuple[str, int]:
    return ip.removeprefix("::ffff:"), port  # a socket for both families has its peers in that form


_LOST_CONNECTION = ("Connection closed by peer", "Connection reset by peer", "Socket closed", "Broken pipe")


def _lost_connection(text: str) -> bool:
    """Tell whether an exception says that another rank is gone."""
    return "DistNetworkError" in text or any(phrase in text for phrase in _LOST_CONNECTION)


def _of_elastic(path: Path) -> str:
    """Return the exception that `torch.distributed.elastic`'s `record` has written."""
    with suppress(OSError, KeyError, TypeError, ValueError):
        record = read_json(path) or {}
        message = record["message"]
        return str(message["message"] if isinstance(message, dict) else message)
    return ""


_TAIL_BYTES = 2000


def _last_line(log: Path) -> str:
    """Return the last line of a log that has any text."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = re.split(
            r"[\r\n]", file.read().decode("utf-8", errors="replace")
        )  # progress bars return without a new line
        texts = ["".join(char if char.isprintable() else "?" for char in line).strip() for line in lines]
        return next((text[:200] for text in reversed(texts) if text), "")
    return ""
