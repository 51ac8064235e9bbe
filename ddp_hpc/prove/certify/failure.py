"""How a run failed or hung: by its logs, its failure reports and its stacks. Pure."""

from __future__ import annotations

import re

from ddp_hpc.prove.certify.records import AttemptRecord, RunRecord

_LOADER_DIED = re.compile(r"DataLoader worker .*(?:exited unexpectedly|is killed by signal)")
_COLLECTIVE = re.compile(
    r"in (?:all_reduce|all_gather\w*|broadcast\w*|barrier|reduce\w*|backward|_engine_run_backward|gather)\b"
)
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x.*$", re.MULTILINE)


def waits_in_collective(record: RunRecord) -> bool:
    """Tell whether a rank of a run that hung waits for the others."""
    return record.outcome == "hung" and any(_COLLECTIVE.search(text) for text in record.stacks.values())


def loader_death(attempt: AttemptRecord) -> str:
    """Return the line of a failed attempt that says that a loader process died."""
    if attempt.ending == "stopped" and not attempt.failed_ranks:
        return ""
    lines = (line for text in [*attempt.failed_ranks.values(), *attempt.logs.values()] for line in text.splitlines())
    return next((line.strip()[:200] for line in lines if _LOADER_DIED.search(line)), "")


def error_of(record: RunRecord) -> str:
    """Return how the last attempt failed, or where it hangs."""
    if record.outcome == "hung":
        return f"the script stopped printing and computing; the stack of {_innermost(record)}"
    last = record.attempts[-1]
    first_causes = [text for rank, text in sorted(last.failed_ranks.items()) if rank not in last.lost_ranks]
    texts = first_causes or list(last.failed_ranks.values()) or [last.reason]
    return next(iter(texts[0].strip().splitlines()), "")[:300] if texts else ""


def _innermost(record: RunRecord) -> str:
    """Return the innermost frames of the first rank's main thread, whose stack faulthandler writes last, in one line."""
    for rank, text in sorted(record.stacks.items()):
        *_, main = _THREAD.split(text)
        frames = [line.strip() for line in main.splitlines() if line.strip().startswith("File ")]
        if frames:
            return f"rank {rank}: " + " < ".join(frame.replace('File "', "").replace('"', "") for frame in frames[:3])
    return "no rank could be read"
