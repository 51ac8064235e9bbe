"""The cluster that tests run jobs on."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import ddp_hpc
from tests.slurm.lab import packages, power
from tests.slurm.lab.settings import ROOT, Lab, Settings, prefix_of
from tests.slurm.lab.tools import PATH, LabError, attempt

T = TypeVar("T")

USER = "hpc"
# To itself, a node's name is the loopback, and its first network is the slow one: the hard case is the normal one.
OPTIONS = (
    "--nodes=4",
    "--gpus=4",
    "--cpus=32",
    "--mem=64000",
    "--debian-hosts",
    "--eth-rate=100mbit",
    "--grace=15",
    "--set=KillWait=2",
)


@dataclass
class Cluster:
    """Four nodes of four GPUs under Slurm, and a head to submit from; `booted` makes one."""

    lab: Lab
    settings: Settings
    _processes: list[subprocess.Popen[str]] = field(default_factory=list)
    _stopped: set[str] = field(default_factory=set)
    _unplugged: set[tuple[str, str]] = field(default_factory=set)

    @property
    def shared(self) -> Path:
        """A directory of the jobs' user that all nodes see; of this machine's /tmp they see nothing."""
        return self.lab.folder / "share"

    def run(
        self,
        *argv: str | Path,
        node: str = "head",
        user: str = USER,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        check: bool = True,
        timeout: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a node as its user would, logged in there with this Python's commands on PATH."""
        process = self.popen(*argv, node=node, user=user, cwd=cwd, env=env)
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        finally:
            self._end(process)
        command = [str(word) for word in argv]
        if check:
            found = f"{' '.join(command)!r} on {node} ended with {process.returncode}:\n{stdout}{stderr}"
            assert process.returncode == 0, found
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)

    def popen(
        self,
        *argv: str | Path,
        node: str = "head",
        user: str = USER,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command on a node; what a test leaves running is killed after it."""
        variables = {"PATH": f"{Path(sys.prefix) / 'bin'}:{PATH}", "LANG": "C.UTF-8", **(env or {})}
        if "PYTHONPATH" in os.environ:
            variables.setdefault("PYTHONPATH", os.environ["PYTHONPATH"])
        process = subprocess.Popen(
            [*power.exec_argv(self.lab, node, user, cwd or self.shared, variables), *(str(word) for word in argv)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def wait_for(self, condition: Callable[[], T], timeout_s: float) -> T:
        """Return the first true value of `condition`; if none comes in time, fail with what Slurm says meanwhile."""
        end = time.monotonic() + timeout_s
        while True:
            value = condition()
            if value:
                return value
            if time.monotonic() > end:
                said = [self.run(*argv, check=False).stdout for argv in (["squeue"], ["sinfo", "--Node", "--long"])]
                raise AssertionError("\n".join([f"waited {timeout_s:g} s in vain", *said]))
            time.sleep(0.1)

    def cancel_all(self) -> None:
        """Cancel every job, also one that its own requeue brings back meanwhile; wait until none is left, not even one that is ending."""
        self.wait_for(self._is_empty, 90)

    def _is_empty(self) -> bool:
        if self.run("squeue", "--noheader", "--states=PENDING,RUNNING").stdout.strip():
            self.run("scancel", "--user", USER, check=False)
        return not self.run("squeue", "--noheader").stdout.strip()

    def kill(self, node: str) -> None:
        """Cut a node's power."""
        tell_lab(self.lab, "kill", node)

    def boot(self, node: str) -> None:
        tell_lab(self.lab, "boot", node)

    def cut(self, node: str, interface: str = "eth0") -> None:
        """Unplug a node's cable."""
        self._unplugged.add((node, interface))
        tell_lab(self.lab, "cut", node, interface)

    def plug(self, node: str, interface: str = "eth0") -> None:
        tell_lab(self.lab, "plug", node, interface)
        self._unplugged.discard((node, interface))

    def reconfig(self, **values: str) -> None:
        """Change keys of slurm.conf for one test, by restarting slurmctld; an empty value drops a key."""
        tell_lab(self.lab, "reconfig", *(f"{key}={value}" for key, value in values.items()))

    def stop_controller(self) -> None:
        self._stop("slurmctld")

    def start_controller(self) -> None:
        self._start("slurmctld")

    def stop_dbd(self) -> None:
        self._stop("slurmdbd")

    def start_dbd(self) -> None:
        self._start("slurmdbd")

    def interface_bytes(self, node: str, interface: str) -> tuple[int, int]:
        """Return how many bytes a node has received and sent by an interface since it booted."""
        names = (f"/sys/class/net/{interface}/statistics/{way}_bytes" for way in ("rx", "tx"))
        received, sent = self.run("cat", *names, node=node).stdout.split()
        return int(received), int(sent)

    def mend(self) -> None:
        """Undo what a test did to the cluster; leave it idle and its queue empty."""
        for process in list(self._processes):
            self._end(process)
        for daemon in sorted(self._stopped):
            self._start(daemon)
        if self.lab.settings() != self.settings:
            self.lab.save(self.settings)
            self.reconfig()  # before nodes boot: while slurmctld is restarted, none can register
        for node, interface in sorted(self._unplugged):
            self.plug(node, interface)
            if self.lab.init_pid(node):  # what went on there while it was cut off must not drain it amid the next test
                self.kill(node)
        for node in self.settings.hostnames:
            if not self.lab.init_pid(node):
                self.boot(node)
        self.cancel_all()
        self.wait_for(self._all_idle, 120)

    def _all_idle(self) -> bool:
        """Tell whether all nodes are idle, where the queue is empty; set right those that are not."""
        states = self.run("sinfo", "--noheader", "--Node", "--partition=batch", "--format=%N %T").stdout.split("\n")
        amiss = dict(line.split() for line in states if line and line.split()[1] != "idle")
        # Seen after slurmctld was restarted amid the end of a job: the queue is empty, the node "completing" for minutes.
        lost = [node for node, state in amiss.items() if state == "completing"]
        for nodes, change in ((lost, ("state=down", "reason=lost-job")), (list(amiss), ("state=resume",))):
            if nodes:  # one that is set down stays so until told; telling the others fails, and does no harm
                argv = ("scontrol", "update", f"nodename={','.join(nodes)}", *change)
                self.run(*argv, user="root", check=False)
        return not amiss

    def _start(self, daemon: str) -> None:
        tell_lab(self.lab, "start", daemon)
        self._stopped.discard(daemon)

    def _stop(self, daemon: str) -> None:
        self._stopped.add(daemon)
        tell_lab(self.lab, "stop", daemon)

    def _end(self, process: subprocess.Popen[str]) -> None:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()
        self._processes.remove(process)


@contextlib.contextmanager
def booted(name: str = "", *options: str, rootfs: Path | None = None) -> Iterator[Cluster]:
    """Boot a cluster, yield it, and take it down.

    Each `name` has a place of its own in `.slurm-lab`, so clusters of other options may be up at the same time:
    `booted("without-dbd", "--no-db")`. With `rootfs`, nodes run the Slurm that lies there, not this machine's.
    """
    lab = _lab("-".join(part for part in (name, rootfs.name if rootfs else "host") if part))
    if rootfs:
        # While a node is dead, Slurm 24.11 notes late that others answered: at 10 s it gives one of them up, too.
        options = (*options, f"--rootfs={rootfs.resolve()}", "--set=SlurmdTimeout=20")
    with _only_one(lab):
        tell_lab(lab, "down")  # of a session that was killed
        try:
            _up(lab, options)
            cluster = Cluster(lab, lab.booted())
            _make_shared(cluster.shared)
            cluster.mend()
            _prove_python(cluster)
            yield cluster
        finally:
            tell_lab(lab, "down")


def why_not() -> str:
    """Return why this machine cannot have a cluster; nothing where it can, what was missing installed."""
    if os.geteuid():
        return "only root can make network namespaces"
    if not Path(power.PYTHON).exists():
        return f"there is no {power.PYTHON} for process 1 of the nodes"
    namespaces = ["unshare", "--mount", "--net", "--uts", "--ipc", "--pid", "--fork"]
    tried = attempt(*namespaces, "mount", "-t", "proc", "proc", "/proc")
    if tried.returncode:
        return f"this machine lets nobody make namespaces ({tried.stderr.strip()})"
    if packages.missing() and not shutil.which("apt-get"):
        return f"there is no apt-get to install {' '.join(packages.missing())}"
    try:
        packages.install(USER)
    except LabError as error:
        return f"packages cannot be installed: {error}"
    return ""


def tell_lab(lab: Lab, *words: str) -> str:
    """Run a command of the lab."""
    argv = [power.PYTHON, str(power.ENTRY.parent), *words]
    done = subprocess.run(
        argv, env={**lab.environment, "PATH": PATH}, capture_output=True, text=True, check=False, timeout=340
    )
    if done.returncode:
        raise LabError(f"`lab {' '.join(words)}` ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def _lab(name: str) -> Lab:
    folder = ROOT / ".slurm-lab" / name
    return Lab(folder=folder, prefix=prefix_of(folder), share=tuple(_what_jobs_need()), user=USER)


def _what_jobs_need() -> list[Path]:
    """Return where this Python and the code under test lie."""
    paths = [ROOT, Path(ddp_hpc.__file__).parents[1], Path(sys.prefix)]
    base = Path(sys.base_prefix)
    if base == Path("/usr"):  # nodes with another Debian keep their own /usr, without this Python
        paths += [Path("/usr/bin/python3"), Path(sys.executable).resolve(), Path(sysconfig.get_path("stdlib"))]
    else:
        paths += [base, base.resolve()]
    return list(dict.fromkeys(paths))


@contextlib.contextmanager
def _only_one(lab: Lab) -> Iterator[None]:
    """Hold a lock that a killed session lets go of."""
    lab.folder.mkdir(parents=True, exist_ok=True)
    with (lab.folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LabError(f"another test session has the cluster in {lab.folder}; wait for its end") from error
        yield


def _up(lab: Lab, options: tuple[str, ...]) -> None:
    """Boot; if what an earlier, killed session left cannot be booted, forget it and boot anew."""
    is_warm = (lab.folder / "state").exists()
    try:
        tell_lab(lab, "up", *OPTIONS, *options)
    except LabError:
        if not is_warm:
            raise
        tell_lab(lab, "down", "--purge")
        tell_lab(lab, "up", *OPTIONS, *options)


def _make_shared(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
    path.mkdir()
    shutil.chown(path, USER, USER)


def _prove_python(cluster: Cluster) -> None:
    """Jobs must run the code under test, and be able to read it."""
    here = Path(ddp_hpc.__file__)
    found = cluster.run(sys.executable, "-c", "import ddp_hpc; print(ddp_hpc.__file__)", node="node1", check=False)
    said = (found.stdout + found.stderr).strip()
    if said != str(here):
        raise LabError(
            f"tests import {here}, but a job of user {USER!r} gets:\n{said}\n"
            "Install it with `pip install -e .`, or set PYTHONPATH; and let others read the checkout (umask 022)."
        )
