"""Reads what a report shows of one run, from the run directory alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from ddp_hpc.base.discretion import mask_secrets, secret_values
from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.base.names import shorten_names
from ddp_hpc.run.run_dir.joined_ranks import read_rendezvous
from ddp_hpc.run.run_dir.ledger import Ending, Ledger
from ddp_hpc.run.run_dir.machine_use import read_uses
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.software_versions import read_environment
from ddp_hpc.run.run_dir.timeline import Mark, RankComparison, read_alarms, read_comparisons, read_marks
from ddp_hpc.watch.attempt_times import read_times
from ddp_hpc.watch.checkpoints import list_checkpoints
from ddp_hpc.watch.compare_runs import config_values
from ddp_hpc.watch.goodput import goodput_of, newest_interval
from ddp_hpc.watch.report.data import RunData
from ddp_hpc.watch.report.series import Series, finite_points, read_series
from ddp_hpc.watch.status import read_status
from ddp_hpc.watch.why.findings import Verdict
from ddp_hpc.watch.why.reading import chosen_attempt, read_facts, to_do
from ddp_hpc.watch.why.verdict import verdict_of

T = TypeVar("T")
_MOST_NAMES = 5


def read_run(run: RunDir, *, now: float, environ: Mapping[str, str] = MappingProxyType({})) -> RunData:
    """Return what the run directory holds. A part that cannot be read is left out, and named in `missing` unless it is of one attempt.

    What variables of `environ` hold that may be secrets is masked, also in the words of exceptions.
    """
    missing: list[str] = []

    def read(what: str, ask: Callable[[], T], otherwise: T) -> T:
        try:
            return ask()
        except (OSError, DdpHpcError, ValueError) as error:
            missing.append(
                f"{what} cannot be read: {str(error).rstrip('.')}. Check the permissions of the run directory."
            )
            return otherwise

    status = read_status(run, now=now)
    marks: list[Mark] = read("The timeline", partial(read_marks, run), [])
    times = read_times(run, now=now, is_alive=status.is_alive, marks=marks)
    ledger = Ledger.read(run)
    numbers = [one.attempt for one in ledger.attempts]
    values = config_values(run)
    secrets = secret_values(values, environ)
    series = read("The metrics", partial(read_series, run), Series())
    looks: list[RankComparison] = read("The comparison of the ranks", partial(read_comparisons, run), [])
    is_script = bool(values.get("script.command")) or status.saves is not None
    missing += _gap_texts(ledger, series, marks, is_script=is_script)
    return RunData(
        path=run.path,
        status=status,
        times=times,
        goodput=goodput_of(times),
        saves=newest_interval(marks, times) if values.get("checkpoint.every_steps") == "auto" else None,
        series=series,
        marks=marks,
        looks=looks,
        alarms=read("The history of slow ranks", partial(read_alarms, run), []),
        meetings=_read_each_attempt(numbers, partial(read_rendezvous, run)),
        checkpoints=read("The checkpoints", partial(list_checkpoints, run, verify=False), []),
        environments=_read_each_attempt(numbers, partial(read_environment, run)),
        failure=read("Why it failed", partial(_failure, run, ledger, secrets), None),
        machines=_read_each_attempt(numbers, lambda number: read_uses(run, number) or None),
        secrets=secrets,
        values=values,
        missing=missing,
    )


def _read_each_attempt(attempts: Sequence[int], read: Callable[[int], T | None]) -> dict[int, T]:
    """Return what is known of each attempt; those of which nothing is are left out."""
    found: dict[int, T] = {}
    for number in attempts:
        with suppress(OSError, DdpHpcError):  # of another user, or damaged: the attempt is shown without it
            if (one := read(number)) is not None:
                found[number] = one
    return found


def _gap_texts(ledger: Ledger, series: Series, marks: Sequence[Mark], *, is_script: bool) -> list[str]:
    """Say which parts of a report a run has no records for, and how to get them."""
    if not ledger.attempts:
        return [
            "No attempt has begun, so there is nothing to draw yet. Write the report again when the run has started."
        ]
    found = []
    if is_script:
        found.append(
            "The run is a script: ddp-hpc sees its start, its saves and its end, and of its steps and losses the newest that it "
            "reports by `ddp_hpc.attach`, so there are no charts of them. With a recipe, this page shows everything."
        )
    elif not series.loss:
        found.append(
            "No loss was logged: the run ended, or this page was written, before the first log interval (`log.every_steps`)."
        )
    never = [name for name, points in series.evaluations.items() if not finite_points(points)]
    if never:
        found.append(f"{shorten_names(never, _MOST_NAMES)}: NaN or infinite in every evaluation, so there is no chart.")
    if not marks and not is_script and finite_points(series.loss):
        found.append(
            "The run was made with an older version of ddp-hpc, which recorded neither the phases of a step nor waits for slow ranks."
        )
    return found


def _failure(run: RunDir, ledger: Ledger, secrets: Sequence[str]) -> tuple[int, Verdict, str] | None:
    failed = [one for one in ledger.attempts if one.ending in (Ending.FAILED, Ending.REFUSED)]
    if not failed:
        return None
    attempt = chosen_attempt(run, ledger, failed[-1].attempt)
    verdict = verdict_of(read_facts(run, ledger, attempt))
    if not verdict.failure:
        return None
    shown = replace(verdict, detail=mask_secrets(verdict.detail, secrets)[:400])
    return attempt.attempt, shown, to_do(run, attempt, verdict, word=run.word)
