"""A worker that is no training: rank zero counts in a file; free of torch."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from ddp_hpc.base import exit_codes
from ddp_hpc.base.durable import replace_text
from ddp_hpc.base.processes import unblock_signals
from ddp_hpc.run.config.resolve import load_resolved
from ddp_hpc.run.run_dir.failure_reports import report_failed_start
from ddp_hpc.run.run_dir.paths import RunDir
from tests.contract.counting_workload import counted

PAUSE_S = 0.01


def preload(run_path: str) -> str:
    """Say that workers may be forked."""
    del run_path
    return ""


def main(run_path: str, environ: Mapping[str, str], *, attempt: int, listen_fd: int | None) -> int:
    """Count on from where the attempt before came to."""
    del listen_fd
    run, rank = RunDir(Path(run_path)), int(environ["RANK"])
    signals: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        signals.append(number)

    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, note)
    unblock_signals()
    log = run.rank_log(attempt, rank)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.touch()
    args = load_resolved(run.config).recipe.args
    try:
        while counted(run) < args["to"]:
            if signals:
                (run.path / f"stopped-{rank}").write_text(signal.Signals(signals[0]).name)
                return exit_codes.STOPPED
            if args.get("raises"):
                raise ValueError("this number cannot be counted")  # noqa: TRY301  reported below, as any error is
            is_held = counted(run) == args.get("holds_at") and not (run.path / "go").exists()
            if rank == 0 and not is_held:
                replace_text(run.path / "count", str(counted(run) + 1), durable=False)
            time.sleep(PAUSE_S)
    except ValueError as error:
        report_failed_start(run.rank_error(attempt, rank), error, rank=rank, log=log)
        return exit_codes.FAILED
    return exit_codes.FINISHED
