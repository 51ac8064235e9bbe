"""What a login node says of its site: one check a row of `CHECKS`. Slurm is asked once for each answer."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from ddp_hpc.config.resolve import Resolved
from ddp_hpc.diagnose.doctor.drained import out_of_service
from ddp_hpc.diagnose.doctor.slurm_versions import known_holes
from ddp_hpc.errors import ConfigError, SlurmUnavailableError
from ddp_hpc.node_checks.node import disk
from ddp_hpc.node_checks.of_files import FEW_FILES, FULL_BYTES, TIGHT_BYTES
from ddp_hpc.run_dir.paths import RunDir
from ddp_hpc.run_dir.preflight import Finding, Level
from ddp_hpc.slurm import client
from ddp_hpc.slurm.directives import directives
from ddp_hpc.slurm.queries import ClusterConfig, NodeState, Partition, TestOnly
from ddp_hpc.spec import RunSpec

T = TypeVar("T")
_NEVER_S = 180 * 86400.0
"""With jobs before it that may run for ever, Slurm's estimates are years ahead."""


@dataclass(frozen=True)
class Site:
    """A login node, and what a run of this configuration would ask of its cluster. A field has no value where its answer is not known."""

    resolved: Resolved
    environ: Mapping[str, str]

    @property
    def spec(self) -> RunSpec:
        """The configuration that a run would have."""
        return self.resolved.spec

    @cached_property
    def has_slurm(self) -> bool:
        return client.is_here(self.environ)

    @cached_property
    def config(self) -> ClusterConfig | None:
        return _answered(lambda: client.config(self.environ))

    @cached_property
    def partitions(self) -> list[Partition] | None:
        return _answered(lambda: client.partitions(self.environ))

    @cached_property
    def nodes(self) -> list[NodeState] | None:
        return _answered(lambda: client.node_reasons(self.environ, partition=self.spec.slurm.partition))

    @cached_property
    def accounts(self) -> list[str] | None:
        return _answered(lambda: client.accounts(self.environ))

    @cached_property
    def test_only(self) -> TestOnly | None:
        return _answered(lambda: _ask_start(self.spec, self.environ))

    @property
    def partition(self) -> Partition | None:
        """The partition that the job would be in; None where it is not known."""
        asked = self.spec.slurm.partition
        return next((one for one in self.partitions or () if (one.name == asked if asked else one.is_default)), None)


def _answered(ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except (ConfigError, SlurmUnavailableError):
        return None


def _ask_start(spec: RunSpec, environ: Mapping[str, str]) -> TestOnly:
    """Ask when Slurm would start a job of this spec; nothing is submitted."""
    with tempfile.TemporaryDirectory() as folder:
        made = directives(spec, RunDir(Path(folder)), chdir=Path("/"), cpus_per_worker=spec.cpus_per_task)
        options = [f"#SBATCH --{one.flag}{'' if one.value is None else f'={one.value}'}\n" for one in made]
        path = Path(folder) / "doctor.sbatch"
        path.write_text(f"#!/bin/sh\n{''.join(options)}exit 0\n", encoding="utf-8")
        return client.test_only(path, environ)


def findings_of(site: Site) -> list[Finding]:
    """Return what all checks found, in the order of the table."""
    checks: Sequence[Callable[[Site], Iterator[Finding]]] = [*ALWAYS, *(OF_SLURM if site.has_slurm else [_no_slurm])]
    return [finding for check in checks for finding in check(site)]


def may_start(findings: Sequence[Finding]) -> bool:
    """Tell whether Slurm would start a job, as far as is known."""
    return not any(one.level == "fail" and one.check in _BEFORE_A_JOB for one in findings)


_BEFORE_A_JOB = frozenset({"partition", "nodes", "start"})


def _profile(site: Site) -> Iterator[Finding]:
    profile = site.resolved.profile
    if profile is None:
        to_do = "`ddp-hpc site init` drafts one from what this cluster says"
        yield Finding(check="site", level="warn", found="no site profile is for this host", to_do=to_do)
    else:
        yield Finding(check="site", level="ok", found=f"{profile.site.name}: {profile.path} ({profile.why})")


def _runs_dir(site: Site) -> Iterator[Finding]:
    place = site.spec.path.parent
    existing = next((path for path in (place, *place.parents) if path.is_dir()), Path("/"))
    found = disk(existing)
    where = f"{place}" if existing == place else f"{place} (not there yet; {existing} is)"
    if found.error:
        yield Finding(
            check="runs directory",
            level="fail",
            found=f"{where} cannot be written: {found.error}",
            to_do="set `runs_dir` to a directory of yours that all nodes share, or free space of your quota",
        )
        return
    free = found.free_bytes or 0
    level: Level = "fail" if free < FULL_BYTES else "warn" if free < TIGHT_BYTES else "ok"
    if found.free_files is not None and found.free_files < FEW_FILES:
        level = "fail"
    files = "" if found.free_files is None else f", {found.free_files} files"
    yield Finding(
        check="runs directory",
        level=level,
        found=f"{where}: writable, {free / 1e9:.1f} GB{files} free",
        to_do="" if level == "ok" else "remove what is not needed there: `ddp-hpc delete RUN`",
    )
    yield Finding(
        check="quota",
        level="unknown",
        found=f"1 MiB could be written to {existing}, so no quota is used up; how much is left, each site's own command says",
        to_do="ask `quota -s`, `lfs quota -h -u $USER DIR`, or your site's command",
    )


def _no_slurm(site: Site) -> Iterator[Finding]:
    del site
    yield Finding(
        check="Slurm",
        level="unknown",
        found="this host has no Slurm that finds a cluster",
        to_do="go to a login node, or load the Slurm module",
    )


def _version(site: Site) -> Iterator[Finding]:
    config = site.config
    if config is None or not config.version:
        yield _unanswered("Slurm")
        return
    holes = known_holes(config.version)
    if holes:
        for hole in holes:
            yield Finding(
                check="Slurm",
                level="warn",
                found=f"{config.version}, older than {hole.fixed_in}: {hole.what} ({hole.source})",
                to_do="ask your administrators whether their packages have the fix; only they can add it",
            )
    else:
        yield Finding(
            check="Slurm", level="ok", found=f"{config.version}, cluster {config.name}; no hole is known to ddp-hpc"
        )


def _preemption(site: Site) -> Iterator[Finding]:
    config, partition = site.config, site.partition
    if config is None or site.partitions is None:
        yield _unanswered("preemption")
        return
    if partition is None:
        to_do = "set `slurm.partition` to one of " + ", ".join(one.name for one in site.partitions)
        asked = site.spec.slurm.partition
        what = f"there is no partition {asked!r}" if asked else "Slurm has no default partition"
        yield Finding(check="partition", level="fail", found=what, to_do=to_do)
        return
    up = "" if partition.is_up else ", but it is not UP: Slurm starts no job there"
    yield Finding(
        check="partition",
        level="ok" if partition.is_up else "fail",
        found=f"{partition.name}, {partition.total_nodes} nodes{up}",
        to_do="" if partition.is_up else "choose another partition, or wait",
    )
    mode = partition.preempt_mode or config.preempt_mode or "OFF"
    if mode == "OFF":
        yield Finding(
            check="preemption",
            level="ok",
            found=f"PreemptMode is OFF in {partition.name}: jobs there are not preempted",
        )
        return
    grace = partition.grace_time_s
    sends = "; Slurm sends the run's own signal first" if config.sends_user_signal else ""
    found = f"PreemptMode is {mode} in {partition.name}, GraceTime {grace} s{sends}"
    if mode == "CANCEL":
        to_do = "Slurm does not start a preempted job again: submit the run again, or choose another partition"
        yield Finding(check="preemption", level="warn", found=found, to_do=to_do)
    elif grace == 0:
        to_do = "a preempted run has no time to save, and repeats the steps since its newest checkpoint: lower `checkpoint.every_steps`"
        yield Finding(check="preemption", level="warn", found=found, to_do=to_do)
    else:
        yield Finding(check="preemption", level="ok", found=found)


def _requeue(site: Site) -> Iterator[Finding]:
    config = site.config
    if config is None:
        yield _unanswered("requeue")
    elif not site.spec.slurm.requeue:
        to_do = "set `slurm.requeue=true`, or submit the run again after each end"
        yield Finding(
            check="requeue", level="warn", found="`slurm.requeue` is false, so the run ends with its job", to_do=to_do
        )
    else:
        default = "by default" if config.job_requeue else "on request (JobRequeue=0), which ddp-hpc makes for each job"
        yield Finding(check="requeue", level="ok", found=f"Slurm requeues jobs {default}")


def _arrays(site: Site) -> Iterator[Finding]:
    size = None if site.config is None else site.config.max_array_size
    if size is None:
        yield _unanswered("job arrays")
    elif size <= 1:
        yield Finding(check="job arrays", level="warn", found=f"MaxArraySize is {size}: there are none, so no sweeps")
    else:
        yield Finding(
            check="job arrays",
            level="ok",
            found=f"MaxArraySize is {size}: a sweep may have {size - 1} points in one array",
        )


def _accounts(site: Site) -> Iterator[Finding]:
    if site.config is not None and not site.config.has_accounting:
        yield Finding(check="accounts", level="ok", found="this cluster has no accounting, so none is needed")
        return
    if site.accounts is None:
        yield _unanswered("accounts")
        return
    if not site.accounts:
        found = f"the accounting database has no account for {client.user_name()}"
        yield Finding(check="accounts", level="warn", found=found, to_do="ask your administrators for one")
        return
    asked = site.spec.slurm.account
    names = [text.partition(" ")[0] for text in site.accounts]
    is_known = asked is None or asked in names
    yield Finding(
        check="accounts",
        level="ok" if is_known else "fail",
        found="; ".join(site.accounts) + ("" if is_known else f"; not {asked!r}, which `slurm.account` names"),
        to_do="" if is_known else f"set `slurm.account` to one of {', '.join(names)}",
    )


def _start(site: Site) -> Iterator[Finding]:
    answer, count = site.test_only, site.spec.resources.nodes
    nodes = "1 node" if count == 1 else f"{count} nodes"
    if answer is None:
        yield _unanswered("start")
    elif answer.refusal is not None:
        last = answer.refusal.splitlines()[-1] if answer.refusal else "it gave no reason"
        yield Finding(
            check="start",
            level="fail",
            found=f"Slurm would refuse a job of {nodes}: {last}",
            to_do="correct the setting that it names",
        )
    elif answer.starts_at is None:
        yield Finding(
            check="start", level="unknown", found=f"Slurm would take a job of {nodes}, but says no time", to_do=""
        )
    else:
        wait_s = max(answer.starts_at - time.time(), 0.0)
        when = (
            "not within half a year"
            if wait_s > _NEVER_S
            else f"in about {wait_s / 60:.0f} min"
            if wait_s > 60
            else "at once"
        )
        where = f" on {answer.nodes}" if answer.nodes else ""
        level: Level = "warn" if wait_s > _NEVER_S else "ok"
        yield Finding(
            check="start", level=level, found=f"a job of {nodes} would start {when}{where}, by Slurm's estimate"
        )


def _nodes(site: Site) -> Iterator[Finding]:
    if site.nodes is None:
        yield _unanswered("nodes")
        return
    bad = out_of_service(site.nodes)
    num_good = len(site.nodes) - len(bad)
    where = f" of partition {site.spec.slurm.partition}" if site.spec.slurm.partition else ""
    needed = site.spec.resources.nodes
    yield Finding(
        check="nodes",
        level="ok" if num_good >= needed else "fail",
        found=f"{num_good} of {len(site.nodes)} nodes{where} take jobs; the run asks for {needed}",
        to_do="" if num_good >= needed else "ask for fewer nodes, or for another partition",
    )
    for one in bad:
        reason = f": {one.reason}" if one.reason else ", without a reason"
        yield Finding(
            check="nodes", level="warn", found=f"{one.node} is {one.state}{reason}", to_do=one.means, nodes=(one.node,)
        )


def _unanswered(check: str) -> Finding:
    return Finding(
        check=check, level="unknown", found="Slurm does not answer", to_do="try again; `scontrol ping` says more"
    )


def host_name() -> str:
    """Return this host's name, for the heading."""
    return os.uname().nodename


ALWAYS: Sequence[Callable[[Site], Iterator[Finding]]] = (_profile, _runs_dir)
OF_SLURM: Sequence[Callable[[Site], Iterator[Finding]]] = (
    _version,
    _preemption,
    _requeue,
    _arrays,
    _accounts,
    _nodes,
    _start,
)
"""In the order in which a person should read them."""
