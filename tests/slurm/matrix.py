"""The cells of the campaign: every fault, by every launcher, as every site sends it; and how one is tried."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.slurm.cluster import Cluster
from tests.slurm.runs import LoginNode
from tests.slurm.survival_table import LAUNCHERS

FLAG = "preempt_send_user_signal"
"""The site's own choice whether a preempted job gets the signal that it asked for."""
_ASKED = re.compile(r"(Cut the (?:power|network) of|Preempt job).*? now")
_NODE = re.compile(r"node\d+")

Admin = Callable[[Cluster, list[str]], None]
"""What an administrator does, to which nodes."""


def cut_power(cluster: Cluster, nodes: list[str]) -> None:
    cluster.kill(nodes[0])


def cut_network(cluster: Cluster, nodes: list[str]) -> None:
    cluster.cut(nodes[0])


def cut_both_networks(cluster: Cluster, nodes: list[str]) -> None:
    cluster.cut(nodes[0], "eth0")
    cluster.cut(nodes[0], "ib0")


def take_away(cluster: Cluster, nodes: list[str]) -> None:
    """Send a job that goes before, and needs the nodes."""
    wanted = f"--nodelist={','.join(nodes)}"
    cluster.run("sbatch", "--partition=high", wanted, "--exclusive", "--output=/dev/null", "--wrap=sleep 1")


@dataclass(frozen=True, kw_only=True)
class How:
    """One way in which a fault comes."""

    told: str
    options: tuple[str, ...] = ()
    """Of `ddp-hpc drill`."""
    admin: Admin | None = None
    site: Mapping[str, str] = field(default_factory=dict)
    """Keys of slurm.conf."""


def _preemptions() -> list[How]:
    hows = [How(told="SIGTERM to the steps, by scancel")]
    for flag, site in (("on", {"SlurmctldParameters": FLAG}), ("off", {"SlurmctldParameters": ""})):
        for prefix, to in (("", "steps"), ("B:", "batch")):
            told = f"a job of a higher partition; {FLAG} {flag}, `--signal={prefix}USR2`"
            options = ("--by-hand", "slurm.partition=low", f"slurm.signal_to={to}")
            hows.append(How(told=told, options=options, admin=take_away, site=site))
    return hows


OTHER_OR_BATCH_HOST = (("another node", ()), ("the batch host", ("--batch-host",)))
FAULTS: Mapping[str, list[How]] = {
    "preempt": _preemptions(),
    "timeout": [
        How(told="a limit of two minutes, `--signal=USR2`", options=("slurm.signal_to=steps",)),
        How(told="a limit of two minutes, `--signal=B:USR2`", options=("slurm.signal_to=batch",)),
    ],
    "kill-worker": [How(told="kill -9")],
    "kill-agent": [How(told="kill -9 (of srun, where there is no agent)")],
    "kill-node": [
        How(told=f"power cut of {which}", options=("--by-hand", *options), admin=cut_power)
        for which, options in OTHER_OR_BATCH_HOST
    ],
    "cut-network": [
        *(
            How(told=f"Slurm's network of {which}", options=("--by-hand", *options), admin=cut_network)
            for which, options in OTHER_OR_BATCH_HOST
        ),
        How(told="all networks of another node", options=("--by-hand",), admin=cut_both_networks),
    ],
    "hang": [How(told="SIGSTOP")],
    "disk-full": [How(told="checkpoints read-only for a while")],
    "slow-rank": [How(told="SIGSTOP and SIGCONT in bursts")],
}
ORDER = [(fault, how.told, launcher) for fault, hows in FAULTS.items() for how in hows for launcher in LAUNCHERS]
QUICK, SLOW = "recipe.args.sample_s=0.004", "recipe.args.sample_s=0.03"
"""The lab's administrator is quick, so steps need not be slow while he is waited for; but Slurm misses a node only after
20 s, for which a run goes on whose ranks still reach each other."""


def try_cell(login: LoginNode, fault: str, how: How, launcher: str) -> dict[str, Any]:
    """Do a drill, and as its administrator what it asks for; return what it reported, and its console's end if it failed."""
    pace = SLOW if fault == "cut-network" else QUICK
    words = [fault, *how.options, pace, f"launcher={launcher}", "--json"]
    argv = [sys.executable, "-m", "ddp_hpc", "drill", *words]
    process = login.cluster.popen(*argv, cwd=login.folder)
    assert process.stdout is not None
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if how.admin is not None and _ASKED.search(line):
            how.admin(login.cluster, _NODE.findall(line))
    text = process.stdout.read()
    process.wait()
    assert text, "".join(said)
    report: dict[str, Any] = json.loads(text)
    row = {"fault": fault, "how": how.told, "launcher": launcher}
    row |= {key: report[key] for key in ("verdict", "lost_steps", "seconds_to_running", "causes", "reason")}
    return row | ({} if row["verdict"] == "PASS" else {"console": login.console(report["run"])[-2000:]})
