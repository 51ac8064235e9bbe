"""Sends a run's metrics to one recorder, in a process of its own beside rank zero.

    python -m ddp_hpc.train.recording.follower RUN_DIR wandb --parent 4711

It reads `metrics.jsonl` as it grows. On its standard input, rank zero says how the attempt has ended; then it sends the rest and
exits. When rank zero dies, the kernel kills it, and the next attempt's process sends what this one has not. Without `--parent`,
as a user starts it after a run, it sends what is left, once, with the variables that the run's `env` sets.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from ddp_hpc.base import processes
from ddp_hpc.base.discretion import is_key_shown, mask_record, mask_secrets, secret_values
from ddp_hpc.base.durable import make_directories, reader_bits
from ddp_hpc.run.config.resolve import flat_spec, load_resolved
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.poll_files import Tail
from ddp_hpc.train.recording.recorders import BACK_ENDS, Ending, RecordedRun, Recorder, identity_of, row_of
from ddp_hpc.train.recording.temporary import temporary_folder

log = logging.getLogger(__name__)

READ_INTERVAL_S = 1.0
"""How often the file is read."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 10.0, 600.0
"""After an error, the next try."""
QUIET_VARIABLES = {"MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_ERROR_REPORTING": "false"}
"""These libraries report to their makers unless a variable says no; a user's own value stays."""
RETRY_VARIABLES = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
"""MLflow's own client tries seven times, and sleeps for up to a minute in between: it would miss that its server is back when the
attempt ends. The tries here do the same, and end their pause then; a user's own value stays."""

Await = Callable[[float], Ending | None]
"""Wait so many seconds for how the attempt ends; None while it goes on."""


def follow(
    run: RunDir,
    open_recorder: Callable[[], Recorder],
    await_ending: Await,
    *,
    describe: Callable[[Exception], str] = str,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Send the run's metrics to a recorder until the attempt ends; return whether the recorder then has all.

    After an error the recorder is opened again, after a pause, and gets all lines again: it knows which it has.
    """
    recorder: Recorder | None = None
    tail, pause_s, not_before = Tail(run.metrics), _FIRST_PAUSE_S, 0.0
    ending: Ending | None = None
    while True:
        if ending or clock() >= not_before:
            try:
                row = None
                for row in filter(None, map(row_of, tail.new_records())):
                    recorder = recorder or open_recorder()
                    recorder.record(row)
                if row and recorder:
                    recorder.flush()
                    pause_s = _FIRST_PAUSE_S
                if ending and recorder:
                    recorder.close(ending)
                if ending:
                    return True
            except Exception as error:  # noqa: BLE001  a library may raise anything
                log.warning("%s. The training goes on; trying again in %.0f s.", describe(error), pause_s)
                recorder, tail = None, Tail(run.metrics)
                not_before, pause_s = clock() + pause_s, min(2 * pause_s, _LONGEST_PAUSE_S)
                if ending:
                    return False
        ending = await_ending(READ_INTERVAL_S)


def masked_config(values: Mapping[str, Any], secrets: Sequence[str]) -> dict[str, Any]:
    """Return what a recorder gets of a configuration: no value of a key that may be secret, and no secret in another's text."""
    return cast(
        "dict[str, Any]", mask_record({key: one for key, one in values.items() if is_key_shown(key, one)}, secrets)
    )


def recorder_lock(run: RunDir, recorder: str) -> Callable[[], bool]:
    """Return what takes a recorder's lock for this process, once, and tells whether it has it.

    Two processes that send at the same time would both send what the recorder lacks. The kernel releases the lock at the process's end.
    """
    held: list[int] = []

    def take() -> bool:
        if not held:
            make_directories(run.recorder_lock(recorder).parent)
            lock = processes.take_lock(run.recorder_lock(recorder))
            held.extend([] if lock is None else [lock])
        return bool(held)

    return take


def _await_ending(seconds: float) -> Ending | None:
    if not select.select([0], [], [], seconds)[0]:
        return None
    word = os.read(0, 64).decode().strip()
    if not word:
        os._exit(1)  # rank zero has died
    return cast("Ending", word)


def main(argv: Sequence[str] | None = None) -> int:
    """Follow one run; return 0 if the recorder has all, else 1."""
    parser = argparse.ArgumentParser(prog="ddp_hpc.train.recording.follower", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("recorder", choices=BACK_ENDS)
    parser.add_argument("--parent", type=int, help="process id of rank zero; without it, send what is left and exit")
    arguments = parser.parse_args(argv)
    if arguments.parent is not None:
        processes.die_with_parent(arguments.parent)
        processes.ignore_stop_signals()
        processes.unblock_signals()
        os.nice(10)  # rank zero computes on the same CPUs
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    run = RunDir(arguments.run)
    if arguments.parent is None and processes.is_locked(run.lock):  # two that send the same would send it twice
        log.error(
            "%s is running: the run itself sends its metrics to %s. Try again when it has ended.",
            run.name,
            arguments.recorder,
        )
        return 1
    take = recorder_lock(run, arguments.recorder)
    if arguments.parent is None and not take():
        log.error(
            "another process sends the metrics of %s to %s. Try again when it has ended.", run.name, arguments.recorder
        )
        return 1
    spec = load_resolved(run.config, is_patient=True)
    if arguments.parent is None:
        os.environ.update(spec.environ | {"TMPDIR": tempfile.gettempdir()})  # rank zero's process has them by itself
    for name, value in (QUIET_VARIABLES | RETRY_VARIABLES).items():
        os.environ.setdefault(name, value)
    os.umask(0o077 & ~reader_bits(run.path))  # what a library writes has the readers of the run's directory
    values = flat_spec(spec)
    secrets = secret_values(values, os.environ)
    subject = RecordedRun(run=run, id=identity_of(run), config=masked_config(values, secrets), environ=os.environ)

    def describe(error: Exception) -> str:
        return mask_secrets(
            f"the recorder {arguments.recorder!r} raised {type(error).__name__}: {error}".rstrip("."), secrets
        )

    back_end = import_module(BACK_ENDS[arguments.recorder])

    def open_alone() -> Recorder:
        if not take():
            raise BlockingIOError("another process sends the metrics of this run")
        return back_end.open_recorder(subject)  # type: ignore[no-any-return]  # each has it

    def ending_of_run(_: float) -> Ending:
        return "finished" if run.done.exists() else "stopped"

    await_ending = ending_of_run if arguments.parent is None else _await_ending
    return 0 if follow(run, open_alone, await_ending, describe=describe) else 1


if __name__ == "__main__":
    with temporary_folder(Path(tempfile.gettempdir())) as temporary:
        tempfile.tempdir = os.environ["TMPDIR"] = str(temporary)  # these libraries leave files there
        result = main()
    sys.stderr.flush()
    os._exit(result)  # a library's thread that hangs must not keep this process
