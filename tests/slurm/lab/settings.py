"""What a lab is: its place on this machine, and what was asked of the cluster in it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.slurm.lab.tools import LabError, is_alive, read

ROOT = Path(__file__).resolve().parents[3]
ETH, IB = "10.77.0", "10.78.0"
"""The two networks, /24 each."""


@dataclass(frozen=True)
class Settings:
    """What `up` was asked for, kept while the cluster lives."""

    nodes: int = 4
    gpus: int = 4
    cpus: int = 16
    mem: int = 16000
    small: int = 0
    grace: int = 10
    sim: int = 0
    db: bool = True
    eth_rate: str = ""
    cgroup: bool = False
    debian_hosts: bool = False
    rootfs: str = ""
    overrides: dict[str, str] = field(default_factory=dict)

    @property
    def workers(self) -> list[str]:
        return [f"node{index}" for index in range(1, self.nodes + 1)]

    @property
    def hostnames(self) -> list[str]:
        return ["head", *self.workers]


@dataclass(frozen=True)
class Lab:
    """A place for one cluster: a directory for its state, and a prefix for what it names on this machine."""

    folder: Path
    """State, logs and configuration, seen by all nodes at the same path."""
    prefix: str
    """Begins the names of network namespaces and cgroups."""
    share: tuple[Path, ...]
    """Seen by all nodes although they lie where nodes have directories of their own, like /tmp and /root."""
    user: str
    """Whose jobs run."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Lab:
        share = environ.get("SLURM_LAB_SHARE", f"{ROOT}:{Path.home() / '.pyenv'}")
        folder = Path(environ.get("SLURM_LAB_DIR", str(ROOT / ".slurm-lab" / "host")))
        return cls(
            folder=folder,
            prefix=environ.get("SLURM_LAB_PREFIX", prefix_of(folder)),
            share=tuple(Path(path) for path in share.split(":") if path),
            user=environ.get("SLURM_LAB_USER", "hpc"),
        )

    @property
    def environment(self) -> dict[str, str]:
        """What another process needs to find this lab."""
        return {
            "SLURM_LAB_DIR": str(self.folder),
            "SLURM_LAB_PREFIX": self.prefix,
            "SLURM_LAB_SHARE": ":".join(str(path) for path in self.share),
            "SLURM_LAB_USER": self.user,
        }

    @property
    def logs(self) -> Path:
        return self.folder / "log"

    @property
    def etc(self) -> Path:
        return self.folder / "etc"

    @property
    def database(self) -> Path:
        return self.folder / "db"

    def record(self, node: str) -> Path:
        """Where the process of a node that is on is noted."""
        return self.folder / "run" / f"{node}.json"

    def netns(self, node: str) -> str:
        return f"{self.prefix}-{node}"

    def settings(self) -> Settings | None:
        """Return what the last `up` was asked for, if there was one."""
        text = read(self.folder / "settings.json")
        return Settings(**json.loads(text)) if text else None

    def booted(self) -> Settings:
        settings = self.settings()
        if settings is None:
            raise LabError("there is no cluster; `up` makes one")
        return settings

    def save(self, settings: Settings) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "settings.json").write_text(json.dumps(asdict(settings), indent=1))

    def init_pid(self, node: str) -> int | None:
        """Return the process that is 1 inside a node, by its number out here; None when the node is off."""
        text = read(self.record(node))
        if not text:
            return None
        record = json.loads(text)
        return int(record["pid"]) if is_alive(record["pid"], record["start"]) else None


def prefix_of(folder: Path) -> str:
    """Return a prefix for what a lab names on this machine, where another checkout may have a cluster up as well."""
    return f"sl{hashlib.sha256(str(folder).encode()).hexdigest()[:6]}"


def address(node: str, network: str = ETH) -> str:
    return f"{network}.1" if node == "head" else f"{network}.{10 + int(node.removeprefix('node'))}"
