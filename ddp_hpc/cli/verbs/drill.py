"""Test this cluster: inject a fault into a short run, and check that the run recovers from it. Prints PASS or FAIL.

The drill submits two runs, one with the fault and one without. Both must end with the same weights, bit for bit, and must
have used each sample once. Without `--config` they train a tiny model on 2 nodes x 2 workers; KEY=VALUE sets any key
(`slurm.partition=gpu`, `resources.gpus_per_node=2`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.exit_codes import FAILED, FINISHED
from ddp_hpc.cli.formatting import as_json, or_dash, table
from ddp_hpc.cli.runs import add_flag, add_patience_option, add_setting_arguments, runs_dir_setting

if TYPE_CHECKING:
    from ddp_hpc.launch.submission.request import SubmitRequest
    from ddp_hpc.prove.drill.scenario import Drill, DrillReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ddp_hpc.prove.drill.faults import FAULTS

    parser.add_argument(
        "fault", choices=FAULTS, help="; ".join(f"{name}: {one.description}" for name, one in FAULTS.items())
    )
    parser.add_argument("--config", type=Path, help="train this configuration instead; it must take a minute or more")
    add_flag(
        parser,
        "--by-hand",
        "for a fault that only an administrator can cause: say at which moment to cause it, and wait until it has happened",
    )
    add_flag(parser, "--batch-host", "inject the fault on the job's first node instead of its last")
    parser.add_argument(
        "--signal", choices=("TERM", "USR2"), default="TERM", help="the signal that `preempt` sends (default: TERM)"
    )
    add_patience_option(parser, 600.0, "FAIL when a run makes no progress for so many seconds")
    add_flag(parser, "--json", "print JSON instead of text")
    add_setting_arguments(parser, "set a key; it overrides every other value")


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    out = sys.stderr if args.json else sys.stdout
    report = _make_drill(args, environment, lambda text: print(text, file=out, flush=True)).run_drill()
    print(as_json(asdict(report)) if args.json else _as_text(report))
    return FINISHED if report.verdict == "PASS" else FAILED


def _make_drill(args: argparse.Namespace, environment: Mapping[str, str], say: Callable[[str], None]) -> Drill:
    from ddp_hpc.prove.drill.faults import FAULTS
    from ddp_hpc.prove.drill.scenario import Drill

    fault = FAULTS[args.fault]
    if fault.inject is None and not args.by_hand:
        raise ConfigError(
            f"Only an administrator can cause the fault {args.fault!r} ({fault.description}). Add `--by-hand`: the drill then "
            "prints when and on which node to cause it, waits for it, and continues."
        )
    if args.by_hand and not fault.by_hand:
        raise ConfigError(f"The drill causes the fault {args.fault!r} itself. Leave out `--by-hand`.")
    name = f"drill-{args.fault}-{time.strftime('%m%d-%H%M%S')}"
    common = [f"name={name}", "train.record_samples=true", *fault.train_settings]
    slower = ["recipe.args.sample_s=0.05"] if args.by_hand and args.config is None else []  # time for a person
    faulty = _make_request(args, [*common, *fault.settings, *slower], environment)
    return Drill(
        fault=args.fault,
        faulty=faulty,
        unbroken=_make_request(args, common, environment, f"name={faulty.spec.name}-unbroken"),
        by_hand=args.by_hand,
        batch_host=args.batch_host,
        signal=args.signal,
        patience_s=args.patience,
        say=say,
    )


def _make_request(
    args: argparse.Namespace, settings: list[str], environment: Mapping[str, str], *last: str
) -> SubmitRequest:
    from ddp_hpc.launch.submission.request import request_of_config
    from ddp_hpc.prove.drill.scenario import CONFIG

    words = [*settings, *args.settings, *runs_dir_setting(args.runs_dir), *last]
    request = request_of_config(args.config or CONFIG, words, environment, site=args.site, is_for_slurm=True)
    if args.config is None:
        return replace(request, import_paths=[Path.cwd()])  # the package's folder has no code of the user's
    return request


def _as_text(report: DrillReport) -> str:
    rows = [(one.name, "yes" if one.is_good else "NO", one.told) for one in report.checks]
    running = None if report.seconds_to_running is None else f"{report.seconds_to_running:.1f} s after the fault"
    told = [
        ("fault", f"{report.fault}: {or_dash(report.what)}"),
        ("at step", f"{or_dash(report.step)}, resumed from {or_dash(report.resumed_at)}"),
        ("running again", or_dash(running)),
        ("lost steps", or_dash(report.lost_steps)),
        ("attempts", ", ".join(report.causes)),
        ("runs", f"{report.run}, {report.unbroken}"),
    ]
    lines = [table(("", ""), told).lstrip("\n"), *([table(("CHECK", "HOLDS", ""), rows)] if rows else [])]
    return "\n".join([*lines, report.verdict if not report.reason else f"{report.verdict}: {report.reason}"])
