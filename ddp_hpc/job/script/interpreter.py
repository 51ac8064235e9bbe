"""Runs a Python script in this forked process as a new Python would: the same `__main__`, `sys.argv`, `sys.path` and end."""

from __future__ import annotations

import atexit
import builtins
import gc
import io
import os
import runpy
import sys
import threading
import types
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import SourceFileLoader

from ddp_hpc.base import processes
from ddp_hpc.cluster.rendezvous.worker_env import USERS_CODE
from ddp_hpc.job.script.plan import ScriptPlan

_SIGINT_CODE = 130


def run_as_main(
    plan: ScriptPlan,
    environ: Mapping[str, str],
    python_path: Sequence[str],
    on_error: Callable[[BaseException], object],
) -> int:
    """Run the script to its end, with what Python does at its own end; return the exit code.

    `on_error` gets the exception that ends the script, not one that ends a process that the script has forked.
    """
    _prepare_process(plan, environ, python_path)
    try:
        code = _run_program(plan, on_error)
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  as `multiprocessing` does in a forked process
    finally:
        atexit._run_exitfuncs()  # noqa: SLF001  likewise
    if threading.active_count() == 1:  # else a daemon thread would find the names gone; of Python, it is stopped before
        names = getattr(sys.modules.get("__main__"), "__dict__", {})  # the script may have taken it away
        names.update(dict.fromkeys(one for one in names if not one.startswith("__")))
        gc.collect()  # what ends by a `__del__`, such as a `zipfile.ZipFile`, ends here
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not getattr(stream, "closed", False):
            stream.flush()
    _close_files()
    return code


def _close_files() -> None:
    """Write out the files that the script has left open, as Python does at its end; `os._exit` follows here, which does not."""
    # In this order: a file of text, or one that compresses, writes to the one below it and closes it.
    # By `type`, because `isinstance` asks proxies for what they stand for, which may be gone.
    files = [one for one in gc.get_objects() if issubclass(type(one), (io.TextIOWrapper, io.BufferedIOBase))]
    lowest = (io.BufferedWriter, io.BufferedRandom)
    for file in sorted(files, key=lambda one: (not isinstance(one, io.TextIOWrapper), isinstance(one, lowest))):
        try:
            if file in (sys.__stdout__, sys.__stderr__) or file.closed or not file.writable():
                continue
            if file.readable():  # another thread may wait in a read, and holds the lock that `close` needs
                file.flush()
            else:
                file.close()
        except Exception as error:  # noqa: BLE001  a class of the script's own may raise anything
            text = f"note: closing {getattr(file, 'name', file)!r} at the script's end has failed: {error}\n"
            with suppress(OSError):
                os.write(2, text.encode(errors="replace"))


def _prepare_process(plan: ScriptPlan, environ: Mapping[str, str], python_path: Sequence[str]) -> None:
    """Make this process what a new Python would be when the script begins."""
    before = {*os.environ}
    os.environ.update(environ)
    for name in before - environ.keys():
        del os.environ[name]
    inserted = {*environ.get("PYTHONPATH", "").split(os.pathsep), *python_path}
    ours = {path for path in environ.get(USERS_CODE, "").split(os.pathsep) if path}
    rest = [path for path in sys.path if path not in inserted and path not in ours]
    first = [] if environ.get("PYTHONSAFEPATH") else [plan.folder]
    sys.path[:] = [*first, *python_path, *rest]
    sys.argv[:] = [plan.argv0, *plan.program.arguments]
    sys.orig_argv[:] = plan.command
    processes.set_process_title(plan.program.words)
    _unbuffer_output()
    gc.freeze()  # `_close_files` does not find what was there before the script
    # A fork has copied the state of generators, so all ranks would draw the same; Python's own seeds itself anew.
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()  # not `torch.seed`, which would have CUDA seeded, too, once the script uses it


def _unbuffer_output() -> None:
    """Write what is printed at once, as torchrun has it (`python -u`): a rank that is killed loses nothing of its log."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        before = getattr(sys, name)
        encoding, errors = getattr(before, "encoding", "utf-8"), getattr(before, "errors", "backslashreplace")
        raw = io.FileIO(number, "w", closefd=False)
        stream = io.TextIOWrapper(raw, encoding=encoding, errors=errors, write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run_program(plan: ScriptPlan, on_error: Callable[[BaseException], object]) -> int:
    pid = os.getpid()
    # Under its second name, `multiprocessing` finds what a spawned process returns. It stays to the end, as exit functions use it.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
    try:
        if plan.program.module is not None:
            runpy._run_module_as_main(plan.program.module)  # type: ignore[attr-defined]  # noqa: SLF001  Python calls it, too
        elif plan.path is not None and plan.path.is_file() and not zipfile.is_zipfile(plan.path):
            _run_file(plan.file)
        else:
            _run_archive(plan)
    except SystemExit as end:
        return _exit_code(end)
    except BaseException as error:  # noqa: BLE001  all that a script may raise
        # From the script's first line on, as Python prints it. No name holds the traceback, which would keep what the script has.
        while error.__traceback__ and error.__traceback__.tb_frame.f_code.co_filename in _RUNNER_FRAME_FILES:
            error.__traceback__ = error.__traceback__.tb_next
        # A signal may be a request to stop: the process beside this one knows. A helper that the script has forked gets here, too.
        if type(error).__name__ not in {"KeyboardInterrupt", "SignalException"} and os.getpid() == pid:
            on_error(error)
        sys.excepthook(type(error), error, error.__traceback__)
        return _SIGINT_CODE if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _run_file(path: str) -> None:
    """Run a file as Python does with one that it is started with."""
    # Not `runpy.run_path`: it sets `sys.argv[0]` to the same text as `__file__`.
    main = sys.modules["__main__"]
    loader = SourceFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __builtins__=builtins, __loader__=loader, __cached__=None, __package__=None)
    with io.open_code(path) as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)  # noqa: S102  this is what the user asks for


def _run_archive(plan: ScriptPlan) -> None:
    """Run the `__main__.py` of a directory or an archive as Python does, which imports from it first."""
    # Not `runpy.run_path`: it sets `sys.argv[0]` to the absolute path.
    if sys.path[:1] == [plan.folder]:
        del sys.path[0]
    sys.path.insert(0, plan.file)
    runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]  # noqa: SLF001  likewise


def _exit_code(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    sys.stderr.write(f"{end.code}\n")
    return 1


_RUNNER_FRAME_FILES = (__file__, "<frozen runpy>", runpy.__file__)
