"""List a run's committed checkpoints, the newest last."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from ddp_hpc.base.exit_codes import FAILED, FINISHED
from ddp_hpc.cli.formatting import as_json, duration, named_numbers, or_dash, size, table
from ddp_hpc.cli.runs import add_flag, add_run_argument, chosen_run
from ddp_hpc.watch.checkpoints import CheckpointInfo, choose_step, digest, list_checkpoints, why_without_checkpoint

HEADER = ("STEP", "SIZE", "WORKERS", "AGE", "EVALUATION", "VERIFIED")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)
    add_flag(parser, "--verify", "read every file and compare its checksum; exit with 1 if a checkpoint is damaged")
    add_flag(parser, "--digest", "print only a hash of the newest checkpoint's training state, to compare runs")
    add_flag(parser, "--json", "print JSON instead of text")


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    run_dir = chosen_run(args, environment)
    is_listed = args.verify or not args.digest
    infos = list_checkpoints(run_dir, verify=args.verify) if is_listed else []
    newest_digest = digest(run_dir, choose_step(run_dir, None)) if args.digest else None
    if args.json:
        found = {"checkpoints": [asdict(info) for info in infos]} if is_listed else {}
        print(as_json(found | ({"digest": newest_digest} if args.digest else {})))
    else:
        table_text = _as_table(infos, verified=args.verify) if infos else why_without_checkpoint(run_dir)
        print("\n".join(filter(None, [table_text if is_listed else None, newest_digest])))
    return FAILED if any(info.problem for info in infos) else FINISHED


def _as_table(infos: Sequence[CheckpointInfo], *, verified: bool) -> str:
    now = time.time()
    rows = [
        (
            str(info.step),
            size(info.num_bytes),
            or_dash(info.world_size),
            duration(None if info.committed_at is None else now - info.committed_at),
            or_dash(named_numbers(info.metrics)),
            f"no: {info.problem}" if info.problem else "yes" if verified else "not checked (add --verify)",
        )
        for info in infos
    ]
    return table(HEADER, rows)
