"""Print type, default and meaning of the configuration's keys: those of every day, of one section, one key, or all."""

from __future__ import annotations

import argparse
import shutil
from collections import Counter
from collections.abc import Mapping

from ddp_hpc.cli.formatting import as_json

EVERYDAY_KEYS = frozenset(
    [
        *("name", "runs_dir", "seed", "env", "script.command", "script.progress", "recipe.target"),
        *("recipe.args", "train.epochs", "train.global_batch_size", "train.micro_batch_size", "train.lr"),
        *("train.precision", "train.init_from", "optimizer.name", "lr_schedule.name", "data.num_workers"),
        *("eval.every_epochs", "log.recorders", "checkpoint.every_steps", "checkpoint.keep_last"),
        *("resources.nodes", "resources.gpus_per_node", "resources.mem_gb", "resources.time_limit_min"),
        *("slurm.partition", "slurm.account", "slurm.modules", "slurm.extra", "container.image"),
    ]
)
"""The thirty keys that most runs set."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "key", metavar="KEY", nargs="?", default="", help="print only this key (`train.lr`) or section (`train`)"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--all", action="store_true", help="print all keys, not only the common ones")
    how.add_argument("--json", action="store_true", help="print a JSON list; without KEY, of all keys")
    how.add_argument(
        "--markdown", action="store_true", help="print the tables of docs/configuration.md; without KEY, of all keys"
    )


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:  # noqa: ARG001  # every verb's signature
    from textwrap import wrap

    from ddp_hpc.run.config.reference import as_markdown, rows_of

    rows = rows_of(args.key)
    if args.json:
        print(as_json(rows))
        return 0
    if args.markdown:
        print(as_markdown(rows), end="")
        return 0
    left_out = [] if args.key or args.all else [row["key"] for row in rows if row["key"] not in EVERYDAY_KEYS]
    width = shutil.get_terminal_size().columns - 4
    for row in rows:
        if row["key"] not in left_out:
            print(f"{row['key']} = {row['default']}  ({row['type']})")
            print(
                "".join(f"    {line}\n" for line in wrap(row["meaning"], max(width, 20), break_on_hyphens=False)),
                end="",
            )
    if left_out:
        sections = Counter(key.rpartition(".")[0] for key in left_out)
        print(f"\n{len(left_out)} more keys: `ddp-hpc config --all`, or `ddp-hpc config SECTION`, which is one of")
        print("\n".join(wrap(", ".join(filter(None, sections)), max(width, 20))))
    return 0
