"""One worker of a run that runs a user's script: starts the script as a child process, and watches over it until it ends.

The script is a process of its own, so that whatever it does at its end (`os._exit`, a crash in C++, a signal) is seen and
written down here, under every launcher. This process passes the stop signal on to the script alone, looks for signs of life,
counts its saves, and hosts the store at which the ranks meet.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

import psutil

from ddp_hpc.base import exit_codes, processes
from ddp_hpc.base.durable import make_directories, new_file_mode
from ddp_hpc.base.errors import ConfigError, exit_code_of
from ddp_hpc.base.names import did_you_mean
from ddp_hpc.base.patience import await_answer
from ddp_hpc.cluster.machine.cgroups import memory_kills, whose_memory_ran_out
from ddp_hpc.cluster.rendezvous.worker_env import HOSTED_STORE_VARIABLES, PROBE_FOLDER
from ddp_hpc.cluster.slow_ranks.reporter import reporter_of
from ddp_hpc.job.script.plan import ScriptPlan, ScriptRank, frozen_code_dirs, make_script_plan
from ddp_hpc.job.script.script_end import report_exit, why_doubtful, write_remarks
from ddp_hpc.job.script.source import early_imports
from ddp_hpc.job.script.start import start_script
from ddp_hpc.job.script.store import host_store, wait_while_used
from ddp_hpc.job.script.watcher import LogEcho, Watcher, worker_exit_code
from ddp_hpc.run.config.resolve import load_resolved
from ddp_hpc.run.run_dir.failure_reports import report_failed_start
from ddp_hpc.run.run_dir.ownership import is_fenced
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import RunSpec
from ddp_hpc.run.workload.missing_files import refuse_missing
from ddp_hpc.run.workload.script_progress import read_seen_files

PRELOADED_MODULES = ("torch", "torch.distributed", "torch.nn.parallel", "torch.optim", "torch.utils.data")
"""What most scripts import; the agent imports it once for all of its workers."""
COMPILER_MODULE = "torch._dynamo"
"""As large as the rest of PyTorch. Optimizers and DDP import it when they are made, only to say what it must not compile."""
OUTLIVED = True
"""What a script has started may go on without it (see `WorkerModule`)."""
HELPER_EXIT_TIMEOUT_S = 2.0
"""How long helper processes of Python may take to exit after the script has (the resource tracker of `multiprocessing`)."""
_why_not_fork = ""
"""Why `preload` has found that scripts must not be forked from this process, beyond what the script's source says."""


def preload(run_path: str) -> str:
    """Import what most scripts import, unless they start as new processes; workers may be forked in any case."""
    global _why_not_fork  # noqa: PLW0603  a fork hands it on to the workers
    run = RunDir(Path(run_path))
    spec = load_resolved(run.config, is_patient=True)
    plan = _make_plan(run, spec, os.environ)
    if not plan.why_exec:
        for name in [*PRELOADED_MODULES, *([COMPILER_MODULE] if plan.may_compile else []), *spec.script.preload]:
            if name in spec.script.preload or find_spec(name.partition(".")[0]) is not None:
                import_module(name)
        if "torch" in sys.modules:
            # By its name, because only `train` may import PyTorch. Where a script compiles after all, its process imports
            # the compiler itself, as it would without an agent.
            import_module("ddp_hpc.train.late_compiler").import_compiler_late()
        _why_not_fork = _what_a_fork_would_lose()
    return ""


def _what_a_fork_would_lose() -> str:
    """Return what a forked process would not have of this one: threads, and CUDA."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "importing the modules of `script.preload` initialised CUDA, which a forked process cannot use"
    if not (left := ", ".join(sorted(set(processes.threads_lost_by_fork())))):
        return ""
    return (
        f"importing PyTorch and `script.preload` left threads running, which a forked process would not have ({left})"
    )


def _make_plan(run: RunDir, spec: RunSpec, environ: Mapping[str, str]) -> ScriptPlan:
    code = next(iter(frozen_code_dirs(environ, run.code_copies)), None)
    return make_script_plan(spec.script, code, environ, Path.cwd())


def check(spec: RunSpec, environ: Mapping[str, str]) -> Iterator[str]:
    """Check that there is such a script that can start, and that Python finds the modules that are named; raise as the job would."""
    program = spec.script.program
    try:
        plan = make_script_plan(spec.script, None, environ, Path.cwd())
    except ConfigError as error:
        if program.script is None and (program.python is not None or "/" not in program.words[0]):
            yield f"a node may have a program that this host lacks: {error}"
        else:
            yield refuse_missing(error, program.script or program.words[0], spec)
        return
    for text in _problems_of_start(spec, plan):
        if not spec.environment_key:
            raise ConfigError(text)
        yield f"`{spec.environment_key}` may give the job another Python: {text}"


def _problems_of_start(spec: RunSpec, plan: ScriptPlan) -> Iterator[str]:
    """Yield why this host's Python, or its Linux, would not start the script."""
    if plan.executable != sys.executable or {*plan.program.options} - {"-u"}:
        if plan.program.python is None and "/" in plan.program.words[0]:
            yield from _problems_of_first_line(plan)
        return
    sys.path.insert(0, plan.folder)
    if plan.path is not None and plan.path.is_file():
        yield from _problems_of_source(plan.path)
    for key, name in [
        ("script.command", plan.program.module),
        *(("script.preload", one) for one in spec.script.preload),
    ]:
        if name is not None and not _has_module(name):
            yield f"`{key}` names the module {name!r}, but this Python has none of that name. {_similar_module_hint(name, plan.folder)}Correct it, or install it."


def _problems_of_first_line(plan: ScriptPlan) -> Iterator[str]:
    if not os.access(plan.executable, os.R_OK):
        return
    with Path(plan.executable).open("rb") as file:
        first = file.readline(256).decode(errors="replace")
    named = first[2:].split()[0] if first.startswith("#!") else ""
    what = f"`script.command` starts {plan.program.words[0]!r}, "
    if named and first.endswith("\r\n"):
        yield f"{what}whose lines end as on Windows, so Linux finds no program {first[2:-1]!r}. Convert it: `sed -i 's/\\r$//' FILE`."
    elif named and not Path(named).exists():
        yield f"{what}whose first line names the program {named!r}, which does not exist. Correct it, or name the program before the script."


def _problems_of_source(path: Path) -> Iterator[str]:
    source = path.read_bytes()
    if b"\0" in source:  # an archive, or compiled
        return
    try:
        imported = [*early_imports(source)]
    except SyntaxError as error:
        yield f"`script.command` starts {path.name!r}, but Python cannot read its line {error.lineno}: {error.msg}. Correct it."
        return
    except (ValueError, RecursionError):
        return
    for line, name in imported:
        if b"sys.path" not in source and not _has_module(name):
            yield (
                f"`script.command` starts {path.name!r}, whose line {line} imports {name!r}, but this Python has no module of that name. "
                f"{_similar_module_hint(name, str(path.parent))}Correct it, or install it."
            )


def _similar_module_hint(name: str, folder: str) -> str:
    parent, _, _ = name.rpartition(".")
    beside = [path.stem for path in Path(folder, *parent.split(".")).glob("*.py")]
    return did_you_mean(name, [f"{parent}.{stem}" if parent else stem for stem in beside], cutoff=0.7)


def _has_module(name: str) -> bool:
    """Return whether Python finds a module, without an import of the packages that hold it."""
    top, *parts = name.split(".")
    with suppress(ValueError):  # a module of this process without a specification
        spec = find_spec(top)
        for part in parts:
            spec = spec and PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations or [])
        return spec is not None
    return True


def main(run_path: str, environ: Mapping[str, str], *, attempt: int, listen_fd: int | None = None) -> int:
    """Run the script to its end; return what that means, as one of `exit_codes`."""
    run, rank = RunDir(Path(run_path)), int(environ["RANK"])
    log = run.rank_log(attempt, rank)
    try:
        make_directories(log.parent)  # stop signals are blocked meanwhile, and the watcher takes them
        log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, new_file_mode(log))
        spec = load_resolved(run.config, is_patient=True)
        plan = _make_plan(run, spec, environ)
        plan = replace(plan, why_exec=plan.why_exec or _why_not_fork)
        if plan.why_exec and rank == 0:
            sys.stderr.write(f"note: the script starts as a new process on each rank, because {plan.why_exec}\n")
        script_rank = ScriptRank(run=run, spec=spec, plan=plan, rank=rank, attempt=attempt)
        return _run_script(script_rank, environ, log_fd, listen_fd)
    except BaseException as error:  # noqa: BLE001  whatever ends a worker is recorded
        report_failed_start(run.rank_error(attempt, rank), error, rank=rank, log=log)
        return exit_code_of(error)


def _run_script(script_rank: ScriptRank, environ: Mapping[str, str], log_fd: int, listen_fd: int | None) -> int:
    """Start the script, and wait for its end."""
    processes.set_dummy_stop_handlers()
    processes.adopt_orphans()  # so that processes that the script leaves behind are found
    watcher = Watcher(
        script_rank=script_rank,
        seen=await_answer(str(script_rank.run.script_progress), lambda: read_seen_files(script_rank.run)),
        echo=LogEcho(script_rank.log) if script_rank.rank == 0 else None,
        probe_folder=Path(environ[PROBE_FOLDER]) if PROBE_FOLDER in environ else None,
    )
    watcher.record_new_saves()  # of the attempts before: what this one adds is counted from there
    before = watcher.seen
    # The script of a worker that is alone hosts the store itself, as it may start ranks of its own and say where they meet; torchrun
    # hosts one in any case. A script in a fork is looked after in `seal_at_rendezvous`.
    has_store = environ["WORLD_SIZE"] != "1" or HOSTED_STORE_VARIABLES.items() <= environ.items()
    is_elsewhere = script_rank.plan.why_exec and script_rank.plan.sets_endpoint
    is_hosted = has_store and not is_elsewhere and find_spec("torch") is not None
    if listen_fd is not None and not is_hosted:
        os.close(listen_fd)  # the script listens there itself
        listen_fd = None
    kills_before = memory_kills()
    pid = start_script(script_rank, environ, log_fd, listen_fd, is_hosted=is_hosted)
    os.close(log_fd)
    # After the fork, because the store has threads. The socket listens already: ranks that connect meanwhile wait.
    store = None if listen_fd is None else host_store(environ, listen_fd)
    began = time.monotonic()
    # It says when the script launches its collectives. A store that the script hosts itself is not for others.
    reporter = reporter_of(
        script_rank.run,
        script_rank.attempt,
        environ,
        environ.get(PROBE_FOLDER),
        has_store=is_hosted and "torch" in sys.modules,
    )
    reporter.start()
    code = watcher.wait_for(pid)
    reporter.close()
    ran_s = time.monotonic() - began
    means = worker_exit_code(
        code, stop_signal=watcher.sent_signal, resume_codes=script_rank.spec.script.resume_exit_codes
    )
    if means == exit_codes.STOPPED and watcher.was_stopped_for_failure:
        means = exit_codes.FAILED  # the rank that has failed has written why
    elif means == exit_codes.FAILED and is_fenced(script_rank.run, script_rank.attempt):
        # `attach` has ended the script, or it could not write: a newer attempt has the run.
        means = exit_codes.FENCED
    elif means == exit_codes.FAILED:
        report_exit(script_rank, code, was_killed=watcher.has_killed, memory_ran_out=whose_memory_ran_out(kills_before))
    if code in script_rank.spec.script.resume_exit_codes and watcher.sent_signal is None:
        with suppress(OSError):  # without it, the supervisor takes the code for the answer to a signal
            script_rank.run.script_asked(script_rank.attempt, script_rank.rank).touch(mode=0o600)
    left = _kill_or_note_leftovers(script_rank, has_finished=means == exit_codes.FINISHED)
    if means == exit_codes.FINISHED:  # before it waits for the other ranks, which may fail without this one
        write_remarks(script_rank, [why_doubtful(script_rank, before, watcher.seen, ran_s), left])
    if script_rank.rank != 0:
        with suppress(OSError):
            script_rank.run.script_ended(script_rank.attempt, script_rank.rank).touch(mode=0o600)
    elif store is not None and means in exit_codes.GOOD_CODES:
        wait_while_used(script_rank, environ)
    return means


def _kill_or_note_leftovers(script_rank: ScriptRank, *, has_finished: bool) -> str:
    """Kill what a script has left running that is to come back; return what one has left that has finished."""
    left = psutil.Process().children(recursive=True)
    if has_finished:
        _, left = psutil.wait_procs(left, timeout=HELPER_EXIT_TIMEOUT_S)
    if not left:
        return ""
    if not has_finished:
        # They would hold ports, memory of GPUs and the lock of the run, which the next attempt needs.
        processes.kill(one.pid for one in left)
        return ""
    pids = ", ".join(str(one.pid) for one in left)
    note = (
        f"rank {script_rank.rank}'s script has finished, but processes that it started still run ({pids}); ddp-hpc does not wait for "
        "them, and does not restart them"
    )
    sys.stderr.write(f"note: {note}\n")
    return note
