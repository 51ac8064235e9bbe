"""A site profile as this host and its Slurm propose it: a draft that says what it was made from."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template

import psutil

from ddp_hpc.base.errors import SlurmUnavailableError
from ddp_hpc.cluster.rendezvous.choose_network import fabric, usable_interfaces
from ddp_hpc.cluster.rendezvous.interfaces import Interface, local_interfaces
from ddp_hpc.cluster.slurm import client
from ddp_hpc.cluster.slurm.queries import ClusterConfig, NodeShape, Partition
from ddp_hpc.run.config.yaml_text import dump_value
from ddp_hpc.run.run_dir.paths import is_folder

_SCRATCH_VARIABLES = ("SCRATCH", "WORK", "WORKSPACE")
_SCRATCH_ROOTS = ("/scratch", "/work", "/lustre/scratch", "/gpfs/scratch", "/mnt/scratch")
_SHARED_FILE_SYSTEMS = ("lustre", "gpfs", "beegfs", "nfs", "nfs4", "ceph", "panfs", "wekafs", "pvfs2", "daos")
_RUNTIMES = ("apptainer", "singularity")


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What a login node says about itself and its cluster."""

    host: str
    cluster: ClusterConfig | None = None
    """None without a Slurm that answers."""
    partitions: Sequence[Partition] = ()
    shapes: Sequence[NodeShape] = ()
    accounts: Sequence[str] = ()
    scratch: str | None = None
    """As a profile would write it."""
    scratch_from: str = ""
    is_scratch_at_home: bool = False
    file_systems: Mapping[str, str] | None = None
    """Mount point -> kind, of those that several hosts may share."""
    interfaces: Sequence[Interface] = ()
    """Of this host that ranks could meet on, the fastest first."""
    runtimes: Sequence[str] = ()
    has_modules: bool = False


def survey(environ: Mapping[str, str]) -> Survey:
    """Look around on this host, and ask Slurm if it is here."""
    user, home = client.user_name(), environ.get("HOME", "")
    scratch, scratch_from = _scratch(environ, user)
    place = os.path.realpath(Template(scratch or "/").safe_substitute(environ))
    mounts = psutil.disk_partitions(all=True)
    found = Survey(
        host=socket.gethostname(),
        scratch=scratch,
        scratch_from=scratch_from,
        is_scratch_at_home=bool(home) and Path(place).is_relative_to(os.path.realpath(home)),
        file_systems={one.mountpoint: one.fstype for one in mounts if one.fstype in _SHARED_FILE_SYSTEMS},
        interfaces=usable_interfaces(local_interfaces()),
        runtimes=[name for name in _RUNTIMES if shutil.which(name, path=environ.get("PATH", ""))],
        has_modules=bool(environ.get("MODULESHOME") or environ.get("LMOD_CMD")),
    )
    if client.is_here(environ):
        with suppress(SlurmUnavailableError):
            return replace(
                found,
                cluster=client.config(environ),
                partitions=client.partitions(environ),
                shapes=client.node_shapes(environ),
                accounts=client.accounts(environ),
            )
    return found


def _scratch(environ: Mapping[str, str], user: str) -> tuple[str | None, str]:
    """Return where large files seem to belong, and how we know."""
    for name in _SCRATCH_VARIABLES:
        if environ.get(name) and is_folder(Path(environ[name])):
            return f"${name}", f"${name} is {environ[name]}"
    for root in _SCRATCH_ROOTS:
        if is_folder(Path(root, user)):
            return f"{root}/$USER", f"{root}/{user} exists"
    return None, ""


def propose(found: Survey, *, name: str | None = None) -> str:
    """Return the draft of a profile, as YAML; a guess stands in it as a comment."""
    lines = [
        f"# Proposed by `ddp-hpc site init` on {found.host}. Check it, and add what is missing: lines with `#` are suggestions.",
        *_section("site", _site_lines(found, name))[1:],
        *(["", f"runs_dir: {found.scratch}/runs"] if found.scratch else []),
        *_section("slurm", _slurm_lines(found)),
        *_section("container", (f"runtime: {name}" for name in found.runtimes[:1])),
        *_network_lines(found),
        *_section("partitions", _partition_lines(found)),
    ]
    return "\n".join(lines) + "\n"


def proposed_name(found: Survey) -> str:
    """Return what to call the site: Slurm's name of the cluster, else the host's without its number."""
    name = found.cluster.name if found.cluster else ""
    return name or re.sub(r"[-_]?\d+$", "", found.host.partition(".")[0]) or "site"


def _section(name: str, lines: Iterator[str]) -> list[str]:
    body = [f"  {line}" for line in lines]
    is_empty = all(line.lstrip().startswith("#") for line in body)
    return ["", f"{'# ' if is_empty else ''}{name}:", *body] if body else []


def _site_lines(found: Survey, name: str | None) -> Iterator[str]:
    pattern = re.sub(r"\d+$", "*", found.host.partition(".")[0])
    yield f"name: {dump_value(name or proposed_name(found))}"
    yield f"hosts: {dump_value([pattern])}  # this host is {found.host}; add the other login nodes"
    if found.scratch:
        yield f"scratch: {found.scratch}  # {found.scratch_from}"
        if not found.is_scratch_at_home:
            yield "no_write: [$HOME]  # runs belong on scratch; remove this line if homes are large and fast here"
    for mount, kind in (found.file_systems or {}).items():
        yield f"# {mount} is a file system that hosts may share ({kind})"


def _slurm_lines(found: Survey) -> Iterator[str]:
    if found.cluster is None:
        return
    default = next((one for one in found.partitions if one.is_default), None)
    if default is not None:
        yield f"partition: {dump_value(default.name)}  # Slurm's own default"
    elif found.partitions:
        yield f"# partition: {found.partitions[0].name}  # Slurm has no default partition: name one"
    if found.accounts:
        yield f"# account: {found.accounts[0].partition(' ')[0]}  # your accounts: {'; '.join(found.accounts)}"
    if not any(one.num_gpus for one in found.shapes):
        yield "# gpu_option: none  # Slurm lists no GPUs here; if nodes have some, it gives whole nodes and no option asks for them"
    if found.has_modules:
        yield "# modules: [...]  # modules that the job's Python or container runtime needs"


def _network_lines(found: Survey) -> list[str]:
    if not found.interfaces:
        return []
    names = ", ".join(f"{one.name} ({fabric(one)})" for one in found.interfaces)
    return [
        "",
        "# The network interfaces that ranks use to reach each other, the best first. This host has",
        f"# {names}; the nodes may have others.",
        "# Unset: each job uses the fastest network that all its nodes share. Set it only if that choice is wrong.",
        "# network:",
        f"#   interfaces: {dump_value([one.name for one in found.interfaces])}",
    ]


def _partition_lines(found: Survey) -> Iterator[str]:
    for partition in found.partitions:
        shapes = [one for one in found.shapes if one.partition == partition.name]
        about = []
        for one in shapes:
            of_gpus = f", {one.num_gpus} {one.gpu_type or 'GPU'}" if one.num_gpus else ""
            about.append(f"{one.num_nodes} nodes of {one.num_cpus} CPUs, {one.mem_mb / 1024:.0f} GiB{of_gpus}")
        yield f"{dump_value(partition.name)}:  # {'; '.join([*about, *_rule_texts(partition)])}"
        gpus = {(one.num_gpus, one.gpu_type) for one in shapes if one.num_gpus}
        if len(gpus) == 1 and len({one.num_gpus for one in shapes}) == 1:
            number, kind = next(iter(gpus))
            whole = f"{{gpus_per_node: {number}{f', gpu_type: {dump_value(kind)}' if kind else ''}}}"
            yield f"  # resources: {whole}  # a whole node for each run that does not say; unset: a run says how many it needs"


def _rule_texts(partition: Partition) -> Iterator[str]:
    if not partition.is_up:
        yield "not UP when this draft was made: Slurm starts no jobs here until an administrator sets it UP; else delete this entry"
    if partition.max_time_min is not None:
        yield f"at most {partition.max_time_min:.0f} min"
    if partition.preempt_mode not in {"", "OFF"}:
        yield f"Slurm may preempt its jobs ({partition.preempt_mode}), {partition.grace_time_s} s after a warning"
