"""What a lab needs installed on this machine."""

from __future__ import annotations

import contextlib
import pwd
import time
from collections.abc import Iterator
from pathlib import Path

from tests.slurm.lab.tools import attempt, sh

PACKAGES = (
    *("slurmctld", "slurmd", "slurmdbd", "slurm-client"),
    *("munge", "mariadb-server", "iproute2", "util-linux"),
    "iptables",  # breaks networks, here and in tests/distributed
    "strace",  # makes the errors of a file system for tests/strange
)
POLICY = Path("/usr/sbin/policy-rc.d")


def missing() -> list[str]:
    """Return the packages of Debian that a lab needs and this machine lacks."""
    done = attempt("dpkg-query", "-W", "-f=${Package} ${db:Status-Status}\n", *PACKAGES)
    installed = {line.split()[0] for line in done.stdout.splitlines() if line.endswith(" installed")}
    return [package for package in PACKAGES if package not in installed]


def install(user: str) -> list[str]:
    """Install what is missing and make the user; return which packages were."""
    packages = missing()
    if packages:
        with _no_daemons():
            apt_install(packages)
    try:
        pwd.getpwnam(user)
    except KeyError:
        sh("useradd", "-m", "-s", "/bin/bash", user)
    return packages


def apt_install(packages: list[str]) -> None:
    env = {"DEBIAN_FRONTEND": "noninteractive"}
    for _ in range(2):  # a mirror may be busy, or in the middle of a change
        if attempt("apt-get", "update", env=env).returncode == 0:
            break
        time.sleep(3)
    else:
        sh("apt-get", "update", env=env)
    sh("apt-get", "install", "-y", "--no-install-recommends", *packages, env=env)


@contextlib.contextmanager
def _no_daemons() -> Iterator[None]:
    """Keep apt from starting the daemons that it installs: ours run in nodes only."""
    if POLICY.exists():
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()
