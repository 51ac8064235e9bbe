"""What to do after an attempt has failed."""

from __future__ import annotations

from ddp_hpc.base.errors import UnreadableError
from ddp_hpc.run.checkpoints.checkpoint_names import committed_steps
from ddp_hpc.run.run_dir.ledger import Attempt
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import read_progress
from ddp_hpc.watch.status import again
from ddp_hpc.watch.why.findings import Verdict
from ddp_hpc.watch.why.signatures import BY_NAME


def to_do(run: RunDir, attempt: Attempt, verdict: Verdict, *, word: str) -> str:
    """Return what to do next, with commands that name this run by its `word`."""
    about, rank = BY_NAME[verdict.failure].to_do, verdict.rank or 0
    return about.format(run=word, attempt=attempt.attempt, rank=rank, again=_again(run) if "{again}" in about else "")


def _again(run: RunDir) -> str:
    """Return where the run goes on when it is submitted again, by the checkpoints that it has now."""
    try:
        return again(committed_steps(run), read_progress(run))
    except (OSError, UnreadableError):
        return f"{run.checkpoints} cannot be read now, so from which step it goes on is not known"
