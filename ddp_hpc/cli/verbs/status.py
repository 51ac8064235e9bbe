"""Show a run's state, step, loss, time left and newest checkpoint."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ddp_hpc.base.patience import known
from ddp_hpc.cli.formatting import as_json, duration
from ddp_hpc.cli.goodput_text import as_line, as_record, goodput_of_run, interval_of_run
from ddp_hpc.cli.runs import add_run, chosen_run, slurm_asker, word_for
from ddp_hpc.cli.status_text import as_text
from ddp_hpc.run.run_dir.ledger import Ending, Ledger
from ddp_hpc.run.run_dir.machine_use import MachineUse, in_words, merged, newest_uses, read_uses, record_of
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.watch.status import RunStatus, read_status

if TYPE_CHECKING:
    from ddp_hpc.run.run_dir.profile_notes import RankProfile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser, optional=True)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print JSON instead of text")
    how.add_argument(
        "--watch",
        action="store_true",
        help="draw a screen every 2 s until the run ends; Ctrl-C ends this command, not the run",
    )


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Print the status."""
    now = time.time()
    run_dir = chosen_run(args, environment)
    if args.watch:
        from ddp_hpc.cli.live import watch  # late: rich is for eyes only

        watch(run_dir, sys.stdout, slurm_asker(environment))
        return 0
    status = read_status(run_dir, now=now, ask=slurm_asker(environment))
    if status.state in {"failed", "cancelled", "stopped"} and status.attempt is not None:
        status = replace(status, reason=_reason(run_dir, status.attempt, status.reason))
    goodput = goodput_of_run(run_dir, status, now=now)
    interval = interval_of_run(run_dir, status, now=now)
    machines, in_words = _machines(run_dir, status, now)
    profiles = _profiles(run_dir, status)
    if args.json:
        more = {
            "goodput": as_record(goodput),
            "save_interval": None if interval is None else asdict(interval),
            "machines": machines,
            "profile": [asdict(one) for one in profiles],
        }
        print(as_json({**asdict(status), **more}))
        return 0
    saves = "" if interval is None else interval.sentence()
    word = word_for(run_dir, environment)
    lines = {"node_time": as_line(goodput), "saves": saves, "machine": in_words, "profile": _in_words(profiles, word)}
    print(as_text(status, now=now, word=word, **lines))
    return 0


def _reason(run_dir: RunDir, attempt: int, reason: str) -> str:
    """Return the reason of an attempt's end, behind what its ranks' logs say where no report does, or where the end followed from that."""
    from ddp_hpc.watch.why.reading import chosen_attempt, read_facts  # late: most runs have not failed
    from ddp_hpc.watch.why.signatures import BY_NAME
    from ddp_hpc.watch.why.verdict import MAY_FOLLOW, verdict_of

    ledger = Ledger.read(run_dir)
    ended = chosen_attempt(run_dir, ledger, attempt)
    has_no_report = ended.ending == Ending.FAILED and not ended.root.fingerprint
    if ended.reason != reason or not (has_no_report or ended.cause in MAY_FOLLOW):
        return reason
    verdict = verdict_of(read_facts(run_dir, ledger, ended))
    is_before = verdict.end or (verdict.basis == "log" and has_no_report)
    return f"{BY_NAME[verdict.failure].title}: {verdict.detail}; then: {reason}" if is_before else reason


def _profiles(run_dir: RunDir, status: RunStatus) -> Sequence[RankProfile]:
    """Return what became of the profiles that the run was asked for."""
    if not known(run_dir.profile, run_dir.profile.is_dir, unknown=False):
        return []
    from ddp_hpc.run.run_dir.profile_notes import read_profiles  # late: most runs are asked for none

    return known(run_dir.profile, lambda: read_profiles(run_dir, is_alive=status.is_alive), unknown=[])


def _in_words(profiles: Sequence[RankProfile], word: str) -> str:
    if not profiles:
        return ""
    from ddp_hpc.cli import profile_text  # late: as above

    return profile_text.as_line(profiles, word=word)


def _machines(run_dir: RunDir, status: RunStatus, now: float) -> tuple[Mapping[str, Any] | None, str]:
    """Return how busy the machines of the newest attempt are, as JSON and as text; None where nothing was measured."""
    attempt = status.attempt
    if attempt is None:
        return None, ""
    read = newest_uses if status.is_alive else read_uses
    uses: Sequence[MachineUse] = known(run_dir.attempt_logs(attempt), lambda: read(run_dir, attempt), unknown=[])
    use = merged(uses)
    if use is None:
        return None, ""
    ago, long = duration(max(0.0, now - use.at)), duration(use.seconds)
    when = f"{ago} ago" if status.is_alive else f"the mean of the last {long} of the newest attempt"
    return record_of(uses), f"{'; '.join(in_words(use))}, {when}"
