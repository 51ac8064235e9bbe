"""How a run failed or hung: by its logs, its failure reports and its stacks. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from ddp_hpc.prove.certify.baseline import Baseline, attempt_with_epochs
from ddp_hpc.prove.certify.output_lines import positions
from ddp_hpc.prove.certify.records import AttemptRecord, RunRecord

_LOAD_ERRORS = re.compile(
    r"PytorchStreamReader|EOFError|unexpected EOF|UnpicklingError|truncated|zip archive|Ran out of input|"
    r"HeaderTooSmall|InvalidHeader|SafetensorError|unexpected end|BadZipFile|JSONDecodeError",
    re.IGNORECASE,
)
_LOADER_DIED = re.compile(r"DataLoader worker .*(?:exited unexpectedly|is killed by signal)")
_TEARDOWN = re.compile(r"_shutdown|destroy_process_group|_exit_function|atexit|_python_exit|in join\b")
_COLLECTIVE = re.compile(
    r"in (?:all_reduce|all_gather\w*|broadcast\w*|barrier|reduce\w*|backward|_engine_run_backward|gather)\b"
)


def hung_in(record: RunRecord, baseline: Baseline) -> Literal["", "teardown", "collective", "elsewhere"]:
    """Return in what a run hung; empty where it did not."""
    if record.outcome != "hung":
        return ""
    # The main thread's stack stands last: faulthandler begins with the thread that got the signal, which is any of them.
    texts = list(record.stacks.values())
    if any(_TEARDOWN.search(text) for text in texts) or _has_trained(record, baseline):
        return "teardown"
    return "collective" if any(_COLLECTIVE.search(text) for text in texts) else "elsewhere"


def _has_trained(record: RunRecord, baseline: Baseline) -> bool:
    """Tell whether the last attempt has printed the last position of the training, and so has only its end before it."""
    if baseline.record.outcome != "finished":
        return False
    ends = (baseline.attempt, attempt_with_epochs(record.attempts[-1]))
    wanted, there = (positions(one.lines, baseline.scale) for one in ends)
    return bool(wanted) and bool(there) and there[-1] == wanted[-1]


def loader_death(attempt: AttemptRecord) -> str:
    """Return the line that says that a loader process died."""
    return _first_match(_LOADER_DIED, [attempt])


def load_error(attempts: Sequence[AttemptRecord]) -> str:
    """Return the line that says why a saved state could not be read."""
    return _first_match(_LOAD_ERRORS, [one for one in attempts if one.ending == "failed"])


def _first_match(pattern: re.Pattern[str], attempts: Sequence[AttemptRecord]) -> str:
    for attempt in attempts:
        for text in [*attempt.failed_ranks.values(), *attempt.logs.values()]:
            match = next((line for line in text.splitlines() if pattern.search(line)), None)
            if match is not None:
                return match.strip()[:200]
    return ""


def error_of(record: RunRecord) -> str:
    """Return how the last attempt failed."""
    last = record.attempts[-1]
    first_causes = [text for rank, text in sorted(last.failed_ranks.items()) if rank not in last.lost_ranks]
    texts = first_causes or list(last.failed_ranks.values()) or [last.reason]
    return next(iter(texts[0].strip().splitlines()), "")[:300] if texts else ""
