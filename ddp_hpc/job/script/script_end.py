"""What is written down about a script's end: why it failed, or why a user may doubt that it has trained."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ddp_hpc.base import processes
from ddp_hpc.base.durable import read_end_of_file, read_json
from ddp_hpc.base.errors import UnreadableError
from ddp_hpc.job.script.plan import ScriptRank
from ddp_hpc.run.checkpoints.checkpoint_names import committed_steps
from ddp_hpc.run.run_dir.failure_reports import (
    WorkerFailure,
    is_lost_connection,
    make_failure,
    report_killed,
    write_failure,
)
from ddp_hpc.run.run_dir.records import write_remark
from ddp_hpc.run.workload.script_progress import SeenFiles

SHORT_RUN_S = 5.0
"""A script that takes no longer has perhaps not trained."""


def report_exception(script_rank: ScriptRank, error: BaseException) -> None:
    """Write the error report of an exception that ends the script; called in the script's process."""
    failure = make_failure(error, rank=script_rank.rank, log=script_rank.log, phase="training")
    write_failure(
        script_rank.run.rank_error(script_rank.attempt, script_rank.rank),
        replace(failure, is_secondary=is_lost_connection(failure.exception), of_script=True),
    )


def report_exit(script_rank: ScriptRank, code: int, *, was_killed: bool, memory_ran_out: str = "") -> None:
    """Write the error report of a script that has ended badly, if its own process has written none."""
    path = script_rank.run.rank_error(script_rank.attempt, script_rank.rank)
    if path.exists():
        return
    if code < 0 and not was_killed:
        report_killed(path, -code, rank=script_rank.rank, log=script_rank.log, memory_ran_out=memory_ran_out)
        return
    text = _elastic_error_text(script_rank.run.torch_error(script_rank.attempt, script_rank.rank)) or last_log_line(
        script_rank.log
    )
    how = (
        f"the script did not exit within {script_rank.spec.script.stop_within_s} s after SIG{script_rank.spec.script.stop_signal} "
        "(`script.stop_within_s`), so ddp-hpc killed it"
        if was_killed
        else f"the script exited with code {code}"
    )
    failure = WorkerFailure(
        rank=script_rank.rank,
        host=processes.host_name(),
        at=time.time(),
        exception=f"{how}; its last line: {text}" if text else f"{how} and printed nothing",
        log=str(script_rank.log),
        is_secondary=is_lost_connection(text),
        of_script=True,
        phase="training",
        exit_code=None if was_killed else code,
    )
    write_failure(path, failure)


def why_doubtful(script_rank: ScriptRank, before: SeenFiles, seen: SeenFiles, ran_s: float) -> str:
    """Return why a user may doubt that a script that has finished has trained; rank zero does that for all.

    `before`: what it had saved in earlier attempts, which may have left it little to do.
    """
    pattern = script_rank.spec.script.progress
    if script_rank.rank != 0 or seen.num_changes > before.num_changes or _may_have_committed(script_rank):
        return ""
    if (pattern is None or before.num_changes) and ran_s >= SHORT_RUN_S:
        return ""
    saved = "" if pattern is None else f" and saved no file of `script.progress` ({seen.pattern or pattern!r})"
    text = last_log_line(script_rank.log)
    return f"the script exited with code 0 after {'less than a second' if ran_s < 1 else f'{ran_s:.0f} s'}{saved}; " + (
        f"its last line: {text}" if text else "it printed nothing"
    )


def _may_have_committed(script_rank: ScriptRank) -> bool:
    try:
        return bool(committed_steps(script_rank.run))
    except UnreadableError:
        return True


def write_remarks(script_rank: ScriptRank, remarks: Iterable[str]) -> None:
    """Have `status` show what a user may not expect of a script that has finished."""
    text = "; ".join(filter(None, remarks))
    if text:
        with suppress(OSError):  # it is in the log, too, or not worth a failure
            write_remark(script_rank.run, script_rank.attempt, script_rank.rank, text)


def _elastic_error_text(path: Path) -> str:
    """Return the exception that `torch.distributed.elastic`'s `record` has written."""
    with suppress(OSError, KeyError, TypeError, ValueError):
        record = read_json(path) or {}
        message = record["message"]
        return str(message["message"] if isinstance(message, dict) else message)
    return ""


_TAIL_BYTES = 2000
_HYDRA_HINT_START = "Set the environment variable HYDRA_FULL_ERROR=1"
"""How Hydra begins the line after each error, which it prints itself."""


def last_log_line(log: Path) -> str:
    """Return the last line of a log that has any text, and is not Hydra's hint after an error."""
    with suppress(OSError):
        # Progress bars return without a new line.
        lines = re.split(r"[\r\n]", read_end_of_file(log, _TAIL_BYTES)[1].decode("utf-8", errors="replace"))
        texts = ["".join(char if char.isprintable() else "?" for char in line).strip() for line in lines]
        return next((text[:200] for text in reversed(texts) if text and not text.startswith(_HYDRA_HINT_START)), "")
    return ""
