"""Which networks and transports NCCL chose, by the lines that it logs (`debug.nccl`). Pure, except `read`.

The lines are those of NVIDIA's documentation (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/logging.html),
and their form may change with NCCL's version. No log of a GPU was measured here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.preflight import Finding

_VERSION = re.compile(r"NCCL version (\S+)")
_NETWORK = re.compile(r"NCCL INFO Using network (.+?)\s*$")
_INTERFACE = re.compile(r"NCCL INFO NET/(\w+)\s*: Using (.+?)\s*$")
_CHANNEL = re.compile(
    r"NCCL INFO (?:Channel|Ring) \S+ : \S+ -> \S+ (?:\[(?:send|receive)\] )?via (?P<kind>[A-Za-z0-9]+)(?:/(?P<how>[\w/]+))?"
)
_WARNING = re.compile(r"NCCL WARN (.+?)\s*$")
_MOST_WARNINGS = 5


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What the logs of a run say."""

    versions: Counter[str] = field(default_factory=Counter)
    networks: Counter[str] = field(default_factory=Counter)
    """`IB`, `Socket`, a plugin's name -> how many processes use it."""
    interfaces: Counter[str] = field(default_factory=Counter)
    transports: Counter[str] = field(default_factory=Counter)
    """`NET/IB/GDRDMA`, `P2P/CUMEM`, `SHM/direct/direct` -> how many channels have it."""
    warnings: Counter[str] = field(default_factory=Counter)


def chosen(lines: Iterable[str]) -> Chosen:
    """Return what some lines say; lines of other programs are passed over."""
    found = Chosen()
    for line in lines:
        if match := _WARNING.search(line):
            found.warnings[match[1]] += 1
        elif match := _CHANNEL.search(line):
            found.transports[_transport(match["kind"], match["how"] or "")] += 1
        elif match := _NETWORK.search(line):
            found.networks[match[1]] += 1
        elif match := _INTERFACE.search(line):
            found.interfaces[f"{match[1]}: {match[2]}"] += 1
        elif match := _VERSION.search(line):
            found.versions[match[1]] += 1
    return found


def _transport(kind: str, how: str) -> str:
    """Return a transport without the number of its device: `NET/IB/0/GDRDMA` is `NET/IB/GDRDMA`."""
    return "/".join(part for part in (kind, *how.split("/")) if part and not part.isdecimal())


def findings_of(found: Chosen, num_files: int) -> Iterator[Finding]:
    """Yield what a person should know of it."""
    if not num_files or not (found.versions or found.networks or found.transports):
        to_do = "submit the run with `debug.nccl=info`; without GPUs, ranks use gloo instead of NCCL, so there is no NCCL log"
        yield Finding(
            check="NCCL",
            level="unknown",
            found=f"the run's {num_files} NCCL log files have no line of NCCL",
            to_do=to_do,
        )
        return
    several = len(found.versions) > 1
    versions = _counted(found.versions) or "the log does not say"
    to_do = "use the same Python environment on all nodes" if several else ""
    yield Finding(check="NCCL version", level="warn" if several else "ok", found=versions, to_do=to_do)
    if found.networks:
        mixed = len(found.networks) > 1
        to_do = "some processes found no fast network: compare the nodes' devices" if mixed else ""
        yield Finding(
            check="NCCL network", level="warn" if mixed else "ok", found=_counted(found.networks), to_do=to_do
        )
    if found.interfaces:
        yield Finding(check="NCCL interface", level="ok", found=_counted(found.interfaces))
    if found.transports:
        is_plain = any(name.startswith("NET/Socket") for name in found.transports)
        to_do = "NET/Socket is TCP: where the nodes have InfiniBand or a plugin for their network, NCCL did not find it"
        yield Finding(
            check="NCCL transport",
            level="warn" if is_plain else "ok",
            found=_counted(found.transports),
            to_do=to_do if is_plain else "",
        )
    for text, count in found.warnings.most_common(_MOST_WARNINGS):
        yield Finding(check="NCCL warning", level="warn", found=f"{text} ({count} x)")


def _counted(names: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in sorted(names.items(), key=lambda item: (-item[1], item[0])))


def read(run: RunDir) -> tuple[Chosen, int]:
    """Return what NCCL's files of a run say, and how many files there are."""
    files = sorted(run.nccl_logs.glob("*.log"))
    return chosen(line for path in files for line in _lines(path)), len(files)


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from file
