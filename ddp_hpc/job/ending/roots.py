"""Which of an attempt's failures came first, as the ledger records it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_hpc.run.run_dir.affected import fingerprint
from ddp_hpc.run.run_dir.failure_reports import WorkerFailure
from ddp_hpc.run.run_dir.ledger import Cause, Root


def root_of(cause: Cause, failures: Sequence[WorkerFailure], *, hosts: Sequence[str]) -> Root:
    """Return the failure that came first; without fields where no worker reported one.

    A sample that is proved to be wrong is the root, whatever other ranks report: their clocks may differ, and what they met may
    follow from this. Where several are wrong at once, or another rank reports what may pass and does not only follow, something
    that they share may be the reason (a file server that is away), so it may pass.
    """
    own = [failure for failure in failures if not (failure.is_secondary or failure.is_hang)]
    if cause != Cause.WORKER_CRASHED or not own:
        return Root()
    proved = [failure for failure in own if failure.entity and not failure.may_recover]
    first = (proved or own)[0]
    num_entities = len({(failure.entity, failure.entity_version) for failure in proved})
    kind = first.exception_type or f"signal {first.signal}, exit code {first.exit_code}"
    return Root(
        fingerprint=fingerprint(kind, first.exception, first.place, hosts=(*hosts, first.host)),
        entity=first.entity,
        entity_version=first.entity_version,
        may_recover=num_entities != 1 or len(proved) < len(own),
        failed_step=None if first.of_script else first.step,
    )
