"""The daemons of a node: how each is started, and how one knows that it answers."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.slurm.lab.settings import Lab, Settings
from tests.slurm.lab.tools import PATH, attempt, sh, wait_for

PORTS = {"slurmctld": 6817, "slurmdbd": 6819}
MUNGE_SOCKET = Path("/run/munge/munge.socket.2")
MARIADB_SOCKET = Path("/run/mysqld/mysqld.sock")

Run = Callable[..., "subprocess.CompletedProcess[str]"]
"""Runs a command in the node: `attempt` for who is inside."""


def start_all(lab: Lab, settings: Settings, node: str) -> None:
    """Start what a node has. Called by its process 1, which all daemons become children of."""
    _spawn(
        *_as("munge"),
        *("munged", "-F", f"--key-file={lab.folder}/munge/munge.key", f"--socket={MUNGE_SOCKET}"),
        *("--pid-file=/run/munge/munged.pid", "--log-file=/run/munge/munged.log", "--seed-file=/run/munge/munged.seed"),
    )
    if node == "head" and settings.db:
        _make_database_files(lab)
        _spawn("mariadbd", f"--defaults-file={lab.etc}/my.cnf")
    wait_for("munge", MUNGE_SOCKET.exists, 20, pause_s=0.02)
    if node != "head":
        _spawn("slurmd", "-D")
        return
    if settings.db:
        wait_for("MariaDB", MARIADB_SOCKET.exists, 60)
        _grant(lab)
        start("slurmdbd", attempt)
    start("slurmctld", attempt)


def start(name: str, run: Run) -> None:
    """Start slurmctld or slurmdbd, and wait until it listens; let one that runs be."""
    if not _is_running(name, run):
        run(*(_as("slurm") if name == "slurmdbd" else []), name)
    wait_for(f"{name} to listen", lambda: _listens(PORTS[name], run), 60)


def stop(name: str, run: Run) -> None:
    """End slurmctld, slurmdbd or mariadbd as its service would, and wait until it is gone."""
    for pid in run("pidof", name).stdout.split():
        run("kill", pid)
    wait_for(f"{name} to end", lambda: not _is_running(name, run), 20)


def _is_running(name: str, run: Run) -> bool:
    return run("pidof", name).returncode == 0


def _listens(port: int, run: Run) -> bool:
    rows = [line.split() for line in run("cat", "/proc/net/tcp").stdout.splitlines()[1:]]
    return any(row[3] == "0A" and int(row[1].partition(":")[2], 16) == port for row in rows)


def _spawn(*argv: str) -> None:
    env = {"PATH": PATH, "LANG": "C.UTF-8"}
    subprocess.Popen(argv, env=env, start_new_session=True, stdin=subprocess.DEVNULL)


def _as(user: str) -> list[str]:
    return ["setpriv", "--reuid", user, "--regid", user, "--clear-groups"]


def _make_database_files(lab: Lab) -> None:
    if (lab.database / "mysql").is_dir():
        return
    sh("install", "-d", "-o", "mysql", "-g", "mysql", lab.database)
    sh(
        *("mariadb-install-db", f"--defaults-file={lab.etc}/my.cnf", f"--datadir={lab.database}", "--user=mysql"),
        *("--skip-test-db", "--auth-root-authentication-method=socket"),
    )


def _grant(lab: Lab) -> None:
    """Let slurmdbd into the database, once."""
    done = lab.database / ".granted"
    if not done.exists():
        sql = (
            "CREATE DATABASE IF NOT EXISTS slurm_acct_db;"
            "GRANT ALL ON slurm_acct_db.* TO slurm@localhost IDENTIFIED BY 'slurm';"
        )
        sh("mariadb", f"--defaults-file={lab.etc}/my.cnf", "-uroot", "-e", sql)
        done.touch()
