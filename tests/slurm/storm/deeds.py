"""How each fault of a storm is made, and how it ends again."""

from __future__ import annotations

import heapq
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.records import read_queued_job
from tests.slurm.cluster import Cluster
from tests.slurm.lab.tools import LabError
from tests.slurm.runs import LoginNode
from tests.slurm.storm.plan import KINDS, Fault

HAND = Path(__file__).with_name("hand.py")
CABLES = (("eth0",), ("ib0",), ("eth0", "ib0"))
ADMIN_S = 15.0
"""How often the administrator lets nodes in again that Slurm has set aside."""
AGAIN_S, PATIENCE_S = 3.0, 30.0
"""Where there is nothing to hit, how soon to look again, and for how long: a run may just be starting again."""
ANSWER_S = 90.0
"""How long a command may wait for Slurm, which may be away, before it is given up."""


@dataclass(kw_only=True)
class Done:
    """A fault that was made, or could not be: there was nothing to hit."""

    kind: str
    at: float
    """Seconds since the epoch."""
    run: str
    node: str = ""
    """That it hit, where it hit one."""
    told: str = ""
    was_made: bool = False
    may_be_blamed: str = ""
    """The run that may say of the node that it failed; `*` is all of them."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


End = Callable[[], None]


@dataclass
class Weather:
    """What is done to the cluster, and what is still to be undone."""

    cluster: Cluster
    login: LoginNode
    names: Sequence[str]
    """Of the runs."""
    say: Callable[[str], None]
    done: list[Done] = field(default_factory=list)
    _ends: list[tuple[float, int, End]] = field(default_factory=list)
    _asked: list[tuple[Done, subprocess.Popen[str], float]] = field(default_factory=list)
    _suspended: set[str] = field(default_factory=set)
    _count: itertools.count[int] = field(default_factory=itertools.count)

    def blow(self, faults: Sequence[Fault]) -> None:
        """Make one fault after another, each at its time; end what has lasted long enough."""
        begin, admin_at = time.monotonic(), 0.0
        waiting = [(fault.at_s, number, fault) for number, fault in enumerate(faults)]
        heapq.heapify(waiting)
        while waiting or self._ends:
            now = time.monotonic()
            if self._ends and self._ends[0][0] <= now:
                heapq.heappop(self._ends)[2]()
            elif waiting and begin + waiting[0][0] <= now:
                at_s, number, fault = heapq.heappop(waiting)
                if not self._make(fault, f"{now - begin:4.0f} s") and at_s < fault.at_s + PATIENCE_S:
                    heapq.heappush(waiting, (at_s + AGAIN_S, number, fault))
            else:
                time.sleep(0.1)
            if now - admin_at > ADMIN_S:
                admin_at = now
                self._resume_nodes()
                self._hear()

    def clear_up(self) -> None:
        """End every fault, and mend the cluster; the runs are left to themselves."""
        for _, _, end in sorted(self._ends, key=lambda one: one[:2]):
            end()
        self._ends.clear()
        for daemon in (self.cluster.start_dbd, self.cluster.start_controller):
            daemon()
        for node in self.cluster.settings.workers:
            for cable in ("eth0", "ib0"):
                self.cluster.plug(node, cable)
            self.cluster.boot(node)
        self._resume_nodes()
        for job in sorted(self._suspended):
            for verb in ("resume", "release"):
                self.cluster.run("scontrol", verb, job, user="root", check=False)
        for _, process, _ in self._asked:
            process.kill()
        self._hear()

    def _make(self, fault: Fault, when: str) -> bool:
        """Make a fault; return whether it was, or at least asked for."""
        done = Done(kind=fault.kind, at=time.time(), run=self.names[fault.run])
        try:
            self._do(fault, done)
        except (LabError, AssertionError, subprocess.TimeoutExpired) as error:  # the node is off, or goes off just now
            done.told = f"not made: {str(error).splitlines()[0]}"
        if done.was_made and KINDS[fault.kind].blames:
            done.may_be_blamed = "*" if fault.kind in {"power", "cable"} else done.run
        if not done.was_made and not any(asked is done for asked, _, _ in self._asked):
            return False
        self.done.append(done)
        self.say(f"{when} {fault.kind:16} {done.run} {done.node}: {done.told}".rstrip(": "))
        return True

    def _do(self, fault: Fault, done: Done) -> None:
        deed, _, what = fault.kind.partition(" ")
        if deed in {"kill", "pause", "freeze"}:
            self._hit(fault, done, deed, what)
        elif fault.kind == "power":
            self._power(fault, done)
        elif fault.kind == "cable":
            self._cable(fault, done)
        elif fault.kind in {"controller", "database"}:
            self._daemon(fault, done)
        else:
            self._ask_slurm(fault, done)

    # --- by kind ------------------------------------------------------------------------------------------------------

    def _hit(self, fault: Fault, done: Done, deed: str, what: str) -> None:
        """Send a signal to one process of the run, on the first of its nodes that has such a process."""
        run, job = self.login.run(done.run), self._job(done.run)
        for node in self._nodes(done.run, fault.chance):
            if not self.cluster.lab.init_pid(node):
                continue
            argv: list[str | Path] = [sys.executable, HAND, run.path, job, deed, what, str(fault.chance)]
            found = self.cluster.run(*argv, node=node, user="root", check=False)
            hit = json.loads(found.stdout or "null")
            if hit:
                done.node, done.was_made = node, True
                done.told = f"process {hit['pid']}{f' for {fault.lasts_s:.0f} s' if fault.lasts_s else ''}"
                if fault.lasts_s:
                    self._later(fault.lasts_s, partial(self._wake, node, hit))
                return
        done.told = f"no {what} to hit"

    def _wake(self, node: str, hit: dict[str, Any]) -> None:
        if self.cluster.lab.init_pid(node):
            words = ("wake", str(hit["pid"]), str(hit["start"]))
            self.cluster.run(sys.executable, HAND, *words, node=node, user="root", check=False)

    def _power(self, fault: Fault, done: Done) -> None:
        done.node = self._nodes(done.run, fault.chance)[0]
        done.was_made = self.cluster.lab.init_pid(done.node) is not None
        done.told = f"off for {fault.lasts_s:.0f} s" if done.was_made else "is off already"
        if done.was_made:
            self.cluster.kill(done.node)
            self._later(fault.lasts_s, lambda: self.cluster.boot(done.node))

    def _cable(self, fault: Fault, done: Done) -> None:
        done.node = self._nodes(done.run, fault.chance)[0]
        cables = CABLES[int(fault.chance * 1000) % len(CABLES)]
        for cable in cables:
            self.cluster.cut(done.node, cable)
        done.told, done.was_made = f"{' and '.join(cables)} for {fault.lasts_s:.0f} s", True
        for cable in cables:
            self._later(fault.lasts_s, partial(self.cluster.plug, done.node, cable))

    def _daemon(self, fault: Fault, done: Done) -> None:
        is_controller = fault.kind == "controller"
        (self.cluster.stop_controller if is_controller else self.cluster.stop_dbd)()
        done.told, done.was_made = f"away for {fault.lasts_s:.0f} s", True
        self._later(fault.lasts_s, self.cluster.start_controller if is_controller else self.cluster.start_dbd)

    def _ask_slurm(self, fault: Fault, done: Done) -> None:
        """Give an order to Slurm, or to ours; what came of it is heard later, for Slurm may be away."""
        job = self._job(done.run)
        match fault.kind:
            case "requeue":
                self._order(done, sys.executable, "-m", "ddp_hpc", "requeue", done.run)
            case "scontrol requeue":
                self._order(done, "scontrol", "requeue", job)
            case "signal batch":
                self._order(done, "scancel", "--batch", "--signal=USR2", job)
            case "suspend":
                self._order(done, "scontrol", "suspend", job, user="root")
                # A job whose node fails meanwhile is held in the queue: who has suspended it has to let it go then.
                resume = f"scontrol resume {job} || scontrol release {job}"
                self._later(fault.lasts_s, partial(self._order, None, "sh", "-c", resume, user="root"))
                self._suspended.add(job)
            case "preempt":
                nodes = ",".join(self._nodes(done.run, fault.chance))
                options = ("--partition=high", f"--nodelist={nodes}", "--exclusive", "--output=/dev/null")
                self._order(done, "sbatch", *options, "--wrap=sleep 2")
            case _:
                self._order(done, "scancel", f"--signal={fault.kind.split()[1]}", job)

    def _order(self, done: Done | None, *argv: str, user: str = "hpc") -> None:
        process = self.cluster.popen(*argv, cwd=self.login.folder, user=user)
        self._asked.append((done or Done(kind="", at=0, run=""), process, time.monotonic() + ANSWER_S))

    def _hear(self) -> None:
        """Note what came of the orders that were given."""
        for order in list(self._asked):
            done, process, until = order
            if process.poll() is None and time.monotonic() < until:
                continue
            process.kill()
            stdout, stderr = process.communicate()
            self._asked.remove(order)
            words = (stdout + stderr).strip().splitlines()
            done.was_made, done.told = process.returncode == 0, words[-1] if words else done.told
            if done.kind and not done.was_made:
                self.say(f"       {done.kind:16} {done.run} was not made: {done.told}")

    # --- what is there ------------------------------------------------------------------------------------------------

    def _job(self, name: str) -> str:
        job = read_queued_job(self.login.run(name))
        assert job is not None, f"{name} has no job"
        return job.job_id

    def _nodes(self, name: str, chance: float) -> list[str]:
        """Return the nodes of the run's newest attempt, beginning with the chosen one; all, where it has had none."""
        attempts = Ledger.read(self.login.run(name)).attempts
        nodes = list(attempts[-1].nodes) if attempts else list(self.cluster.settings.workers)
        first = int(chance * len(nodes))
        return [*nodes[first:], *nodes[:first]]

    def _later(self, after_s: float, end: End) -> None:
        heapq.heappush(self._ends, (time.monotonic() + after_s, next(self._count), end))

    def _resume_nodes(self) -> None:
        """Let nodes in again that Slurm has set aside though they are on, as an administrator does."""
        if "slurmctld" in self.cluster._stopped:
            return
        said = self.cluster.run("sinfo", "--noheader", "--Node", "--partition=batch", "--format=%N %T", check=False)
        rows = [line.split() for line in said.stdout.splitlines() if line]
        for node, state in rows:
            if state.rstrip("*") in {"down", "drained", "draining"} and self.cluster.lab.init_pid(node):
                self.cluster.run("scontrol", "update", f"nodename={node}", "state=resume", user="root", check=False)
