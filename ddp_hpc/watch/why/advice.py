"""What to do after an attempt has failed."""

from __future__ import annotations

from ddp_hpc.run.run_dir.ledger import Attempt
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.watch.status import goes_on
from ddp_hpc.watch.why.findings import Verdict
from ddp_hpc.watch.why.signatures import BY_NAME


def to_do(run: RunDir, attempt: Attempt, verdict: Verdict, *, word: str) -> str:
    """Return what to do next, with commands that name this run by its `word`."""
    about, rank = BY_NAME[verdict.failure].to_do, verdict.rank or 0
    return about.format(run=word, attempt=attempt.attempt, rank=rank, again=goes_on(run) if "{again}" in about else "")
