"""Have storms, one a seed, and write down what they came to.

    python -m tests.slurm.storm --seed 1 2 3 --minutes 8 --runs 3 --without supervisor

The plan of a seed is always the same; how far the runs are when a fault comes is not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.slurm.cluster import USER, Cluster, booted, why_not
from tests.slurm.lab.settings import ROOT
from tests.slurm.runs import LoginNode
from tests.slurm.storm.course import Asked, storm
from tests.slurm.storm.plan import KINDS, kinds_of, plan
from tests.slurm.storm.results import add_result, as_table

EVIDENCE = ROOT / ".slurm-lab" / "storms"


def main(argv: Sequence[str]) -> int:
    """Return 1 where a seed has failed, 2 where none could be tried."""
    arguments = parser().parse_args(argv)
    try:
        kinds = kinds_of(arguments.without, arguments.only)
    except ValueError as error:
        say(f"error: {error}")
        return 2
    if reason := why_not():
        say(f"error: there can be no cluster here: {reason}")
        return 2
    rootfs = os.environ.get("DDP_HPC_SLURM_ROOTFS")
    results = []
    with booted(rootfs=Path(rootfs) if rootfs else None) as cluster:
        for seed in arguments.seed:
            faults = plan(
                seed, seconds=arguments.minutes * 60, num_runs=arguments.runs, gap_s=arguments.gap, kinds=kinds
            )
            say(f"seed {seed}: {len(faults)} faults in {arguments.minutes:g} minutes on {arguments.runs} runs")
            asked = Asked(seed=seed, minutes=arguments.minutes, num_runs=arguments.runs, faults=faults)
            login = fresh_login(cluster, f"storm-{seed}")
            try:
                left_out = {"left_out": [kind for kind in KINDS if kind not in kinds]}
                results.append(storm(cluster, login, asked, say) | left_out)
            except BaseException:
                say(f"the evidence is in {keep(cluster, login, seed)}")
                raise
            if not arguments.no_results:
                add_result({key: value for key, value in results[-1].items() if key != "what"})
            if results[-1]["verdict"] != "PASS":
                say(f"seed {seed} has failed; the evidence is in {keep(cluster, login, seed)}")
            cluster.mend()
    say(as_table(results))
    return int(any(result["verdict"] != "PASS" for result in results))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(
        prog="python -m tests.slurm.storm",
        description=__doc__,
        epilog=f"Kinds: {', '.join(KINDS)}. `--without supervisor` leaves out what a kind's last word names.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--seed", type=int, nargs="+", default=[1])
    top.add_argument("--minutes", type=float, default=8.0)
    top.add_argument("--runs", type=int, default=3)
    top.add_argument("--gap", type=float, default=6.0, help="seconds from one fault to the next, on average")
    top.add_argument("--without", type=names, default=[], metavar="KIND,...", help="leave these kinds out")
    top.add_argument("--only", type=names, default=[], metavar="KIND,...", help="have these kinds alone")
    top.add_argument("--no-results", action="store_true", help="leave docs/results as it is")
    return top


def names(text: str) -> list[str]:
    """Return the names of a list with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def fresh_login(cluster: Cluster, name: str) -> LoginNode:
    """Return the head, in a new directory that all nodes see."""
    folder = cluster.shared / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.chown(folder, USER, USER)
    return LoginNode(cluster, folder)


def keep(cluster: Cluster, login: LoginNode, seed: int) -> Path:
    """Copy the runs' directories and Slurm's logs to where the next storm leaves them alone; return where."""
    folder = EVIDENCE / f"seed-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(login.folder, folder / "runs", symlinks=True)
    shutil.copytree(cluster.lab.logs, folder / "slurm-logs")
    return folder


def say(text: str) -> None:
    """Print a line at once: it lasts a while."""
    print(text, flush=True)  # noqa: T201  its output


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
