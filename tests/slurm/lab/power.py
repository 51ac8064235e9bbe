"""Switching nodes on and off, and reaching into one that is on."""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
from pathlib import Path

from tests.slurm.lab import cgroups
from tests.slurm.lab.settings import Lab
from tests.slurm.lab.tools import PATH, LabError, attempt, is_alive, read, start_of, wait_for

PYTHON = "/usr/bin/python3"  # of this machine, not of an environment: its library stays within reach of every node
ENTRY = Path(__file__).with_name("__main__.py")


def boot(lab: Lab, node: str) -> None:
    """Start process 1 of a node in new namespaces; let one that is on be."""
    if lab.init_pid(node):
        return
    log_path = lab.logs / f"{node}.log"
    with log_path.open("a") as log:
        outer = subprocess.Popen(
            [
                *("nsenter", f"--net=/run/netns/{lab.netns(node)}"),
                *("unshare", "--uts", "--ipc", "--mount", "--pid", "--propagation", "private"),
                *("--fork", "--kill-child=KILL", PYTHON, str(ENTRY), "_init", node),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env={**lab.environment, "PATH": PATH, "LANG": "C.UTF-8"},
        )

    def child() -> int | None:
        if outer.poll() is not None:
            raise LabError(f"{node} died as it booted:\n{read(log_path)[-2000:]}")
        pids = read(f"/proc/{outer.pid}/task/{outer.pid}/children").split()
        return int(pids[0]) if pids else None

    pid = wait_for(f"process 1 of {node}", child, 10, pause_s=0.01)
    assert pid is not None
    lab.record(node).write_text(json.dumps({"pid": pid, "start": start_of(pid)}))


def kill(lab: Lab, node: str) -> None:
    """Cut a node's power: all its processes are gone at once."""
    pid = lab.init_pid(node)
    if pid:
        start = start_of(pid)
        os.kill(pid, signal.SIGKILL)

        def is_dead() -> bool:
            cgroups.thaw(lab.prefix, node)
            return not is_alive(pid, start)

        wait_for(f"{node} to die", is_dead, 15, pause_s=0.01)
    lab.record(node).unlink(missing_ok=True)


def exec_argv(lab: Lab, node: str, user: str, cwd: str | Path, env: dict[str, str]) -> list[str]:
    """Return what, followed by a command, runs it on a node as a login of that user would, with `env` added."""
    pid = lab.init_pid(node)
    if not pid:
        raise LabError(f"{node} is off")
    account = pwd.getpwnam(user)
    argv = ["nsenter", "-t", str(pid), "--net", "--uts", "--ipc", "--mount", "--pid", "--root", f"--wdns={cwd}"]
    if user != "root":
        argv += ["setpriv", "--reuid", str(account.pw_uid), "--regid", str(account.pw_gid), "--init-groups"]
        argv += ["--inh-caps=-all"]
    login = {"PATH": PATH, "HOME": account.pw_dir, "USER": user, "LOGNAME": user, "SHELL": "/bin/bash"}
    return [*argv, "env", "-i", *(f"{key}={value}" for key, value in {**login, **env}.items())]


def on(lab: Lab, node: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run a command on a node as root; failing is an answer."""
    return attempt(*exec_argv(lab, node, "root", "/", {}), *argv)
