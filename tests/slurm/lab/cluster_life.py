"""A whole cluster: up, down, and with other settings."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from tests.slurm.lab import cgroups, config_files, daemons, network, packages, power
from tests.slurm.lab.settings import Lab, Settings
from tests.slurm.lab.tools import LabError, wait_for

KEPT_BY_A_LAB = ("db", "state", "log", "run", "etc", "etc.node", "munge")


def up(lab: Lab, settings: Settings) -> str:
    """Boot a cluster and wait until all its nodes are idle; return how long each part took."""
    if os.geteuid():
        raise LabError("only root can make namespaces with networks and mounts")
    old = lab.settings()
    if old and all(lab.init_pid(node) for node in old.hostnames):
        return "already up"
    clock = _Clock()
    packages.install(lab.user)
    lab.save(settings)
    config_files.write_all(lab, settings)
    network.up(lab, settings)
    clock.mark("network")
    power.boot(lab, "head")
    _wait_for_controller(lab)
    clock.mark("slurmctld")
    for node in settings.workers:  # later than slurmctld: a slurmd that finds none tries again after 1, 2, 4 .. s
        power.boot(lab, node)
    if settings.db:
        _make_accounts(lab, settings)
        clock.mark("accounts")
    wait_for("all nodes to be idle", lambda: num_idle(lab) == settings.nodes, 60)
    clock.mark("nodes")
    return f"up; seconds: {', '.join(clock.marks)}"


def down(lab: Lab, *, purge: bool) -> None:
    """Switch everything off. Jobs and accounting outlive it, unless purged."""
    settings = lab.settings()
    if settings and lab.init_pid("head") and not purge:
        for name in ("slurmctld", *(("slurmdbd", "mariadbd") if settings.db else ())):
            daemons.stop(
                name, partial(power.on, lab, "head")
            )  # slurmctld writes that jobs have ended, or they keep nodes
    for node in reversed(settings.hostnames if settings else []):
        power.kill(lab, node)
    network.down(lab)
    cgroups.remove(lab.prefix)
    if purge:
        for name in KEPT_BY_A_LAB:
            shutil.rmtree(lab.folder / name, ignore_errors=True)
        (lab.folder / "settings.json").unlink(missing_ok=True)


def reconfigure(lab: Lab, overrides: dict[str, str]) -> None:
    """Change keys of slurm.conf and restart slurmctld with them; an empty value drops a key."""
    settings = lab.booted()
    settings = replace(settings, overrides={**settings.overrides, **overrides})
    lab.save(settings)
    config_files.write_all(lab, settings)
    on_head = partial(power.on, lab, "head")
    daemons.stop("slurmctld", on_head)
    daemons.start("slurmctld", on_head)
    _wait_for_controller(lab)
    on_head("scontrol", "reconfigure")


def num_idle(lab: Lab) -> int:
    done = power.on(lab, "head", "sinfo", "-h", "-N", "-p", "batch", "-o", "%T")
    return done.stdout.split().count("idle")


def _wait_for_controller(lab: Lab) -> None:
    def answers() -> bool:
        if not lab.init_pid("head"):
            raise LabError(f"the head died; see {lab.logs}")
        return "is UP" in power.on(lab, "head", "scontrol", "ping").stdout

    wait_for(f"slurmctld to answer; see {lab.logs}", answers, 60)


def _make_accounts(lab: Lab, settings: Settings) -> None:
    """Give the user an account and three qualities of service, once."""
    done = lab.database / ".accounts"
    if done.exists():
        return
    sacctmgr = partial(power.on, lab, "head", "sacctmgr")
    registered: Callable[[], bool] = lambda: sacctmgr("-nP", "show", "cluster").stdout.startswith("lab|")  # noqa: E731
    wait_for("the cluster in slurmdbd", registered, 30, pause_s=0.1)
    for words in (
        "add qos low,normal,high",
        "modify qos high set priority=100 preempt=low,normal",
        f"modify qos low set priority=1 gracetime={settings.grace} preemptmode=requeue",
        "add account lab description=lab organization=lab",
        f"add user {lab.user} account=lab",
        f"modify user {lab.user} set qos=low,normal,high defaultqos=normal",
        "modify user root set qos=low,normal,high",
    ):
        sacctmgr("-i", *words.split())
    done.touch()


class _Clock:
    """When each part of a long thing was done, since its beginning."""

    def __init__(self) -> None:
        self.begin = time.monotonic()
        self.marks: list[str] = []

    def mark(self, what: str) -> None:
        self.marks.append(f"{what} {time.monotonic() - self.begin:.2f}")
