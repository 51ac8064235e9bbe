"""A subtree of each cgroup v1 controller for every node, which the node takes for the whole."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tests.slurm.lab.tools import read, sh

TOP = Path("/sys/fs/cgroup")
CONTROLLERS = ("freezer", "memory", "devices", "cpuset", "cpuacct", "cpu", "pids")
NEEDED = ("freezer", "memory", "devices", "cpuset")


def usable() -> bool:
    """Say whether this machine has the controllers that Slurm's plugins for cgroup v1 ask for."""
    return all((TOP / controller).is_mount() for controller in NEEDED)


def enter(prefix: str, node: str) -> None:
    """Make a node's subtrees; show each to the node as the controller's root. Called inside the node."""
    for controller in CONTROLLERS:
        top = TOP / controller
        if not top.is_mount():
            continue
        lab = top / f"{prefix}-lab"
        own = lab / node
        for folder in (lab, own):
            folder.mkdir(exist_ok=True)
            if controller == "cpuset":
                _inherit_cpuset(folder)
        sh("mount", "--bind", own, top)


def _inherit_cpuset(folder: Path) -> None:
    """A new cpuset allows nothing; allow what its parent allows."""
    for key in ("cpus", "mems"):
        name = f"cpuset.{key}" if (folder / f"cpuset.{key}").exists() else key
        (folder / name).write_text(read(folder.parent / name) or "0")


def thaw(prefix: str, node: str) -> None:
    """Let a node's frozen processes go on: Slurm freezes a step before it kills it, and what is frozen does not die."""
    for path in (TOP / "freezer" / f"{prefix}-lab" / node).rglob("freezer.state"):
        with contextlib.suppress(OSError):  # Slurm has removed it
            path.write_text("THAWED")


def remove(prefix: str) -> None:
    for controller in CONTROLLERS:
        lab = TOP / controller / f"{prefix}-lab"
        folders = [path for path in lab.rglob("*") if path.is_dir()]
        for folder in [*sorted(folders, reverse=True), lab]:
            with contextlib.suppress(OSError):  # not there, or a process has not left it yet
                folder.rmdir()
