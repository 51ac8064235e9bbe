"""A script on two nodes that a higher partition takes away, and of which a rank is killed, beside an undisturbed one on two others."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddp_hpc.run.run_dir.ledger import Attempt
from tests.slurm import strike
from tests.slurm.cluster import USER, Cluster
from tests.slurm.faulty_runs import attempts, await_done, await_first_end, job_id
from tests.slurm.lab.settings import ROOT
from tests.slurm.runs import LoginNode, world

SCRIPTS = ROOT / "tests" / "distributed" / "scripts"
PATIENCE_S = 300
PREEMPTOR = ("--partition=high", "--nodelist=node[1-2]", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")


@dataclass(frozen=True)
class Script:
    """A script, as its user submits it from a directory of its own."""

    files: Path
    """The script, or a directory of modules with one."""
    command: Sequence[str]
    saved: str | None = None
    """The files that say that it has saved, as a pattern below that directory; None: what it commits by `attach`."""
    settle_s: float = 0.0
    """How long they must stay the same to be whole; none for what is published at once."""
    workers_per_node: int = 1
    data: Mapping[str, str] = field(default_factory=dict)
    """Files of text that it reads, by name."""

    def submit(self, place: LoginNode, name: str, *settings: str) -> None:
        copied = place.folder / self.files.name
        if self.files.is_dir():
            shutil.copytree(self.files, copied, ignore=shutil.ignore_patterns("__pycache__"))
            for one in (copied, *copied.rglob("*")):
                shutil.chown(one, USER, USER)
        else:
            shutil.copy(self.files, copied)
        for file, text in self.data.items():
            (place.folder / file).write_text(text)
        keys = [f"name={name}", "resources.cpus_per_worker=1", *world(2, self.workers_per_node), *settings]
        keys += [f"script.progress={self.saved}"] if self.saved else []
        done = place.type("submit", "--cluster", "slurm", *keys, "--", *self.command)
        assert done.returncode == 0, done.stdout + done.stderr


def beside(login: LoginNode, name: str) -> LoginNode:
    """Return the head, in an empty directory below."""
    folder = login.folder / name
    folder.mkdir()
    shutil.chown(folder, USER, USER)
    return LoginNode(login.cluster, folder)


def strike_rank(place: LoginNode, name: str, signal: str, script: Script | None) -> str:
    """Signal the script's last rank on node2, as soon as the run saves (with `script`) or at once; return what was done."""
    run, words = place.run(name), []
    if script:
        saved = [place.folder, script.saved] if script.saved else [run.checkpoints, "step-????????"]
        words = [*saved, script.settle_s]
    argv = [sys.executable, strike.__file__, run.path, signal, *words]
    return place.cluster.run(*map(str, argv), node="node2", user="root", timeout=PATIENCE_S).stdout


def facts_of_job(cluster: Cluster, job: str) -> dict[str, str]:
    """Return what Slurm says of a job."""
    return dict(re.findall(r"(\w+)=(\S*)", cluster.run("scontrol", "show", "job", "--oneliner", job).stdout))


def preempt_and_kill(login: LoginNode, script: Script) -> tuple[LoginNode, LoginNode]:
    """Train a script to its end twice, at the same time: `it` is preempted and killed, each after it has saved; `calm` is not.

    A rank hears of the preemption late. Both have directories of their own, which are returned.
    """
    cluster, place, calm = login.cluster, beside(login, "it"), beside(login, "calm")
    script.submit(place, "it", "slurm.partition=low", "slurm.nodelist=node[1-2]")
    script.submit(calm, "calm", "slurm.nodelist=node[3-4]")
    job = job_id(place, "it")

    assert strike_rank(place, "it", "STOP", script), place.console("it")
    cluster.run("sbatch", *PREEMPTOR)
    cluster.wait_for(lambda: facts_of_job(cluster, job)["PreemptTime"] != "None", 60)
    strike_rank(place, "it", "CONT", None)
    await_first_end(place, "it")
    assert strike_rank(place, "it", "KILL", script), place.console("it")
    await_done(place, "it")
    await_done(calm, "calm")
    return place, calm


def assert_came_back_once_each(
    place: LoginNode, *, requeued: Collection[str] = ("requeue",)
) -> tuple[Attempt, Attempt, Attempt]:
    """Check that one preemption made one requeue, and one kill one new attempt in the same job; return the attempts."""
    first, second, third = attempts(place, "it")
    assert (first.cause, first.ending) == ("preempted", "stopped"), first.reason
    assert first.next in requeued
    assert (second.cause, second.next, second.ending) == ("worker crashed", "in place", "failed"), second.reason
    assert "SIGKILL" in second.reason
    assert third.cause == "finished"
    job = job_id(place, "it")
    assert {one.job_id for one in (first, second, third)} == {job}
    assert facts_of_job(place.cluster, job)["Restarts"] == "1"
    return first, second, third
