"""What a login node says of its site: one check a row of `CHECKS`. Slurm is asked once for each answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from ddp_hpc.cluster.node_checks.of_files import FEW_FILES, FULL_BYTES, SLOW_WRITE_S, TIGHT_BYTES
from ddp_hpc.cluster.node_checks.of_node import TO_FIT, misfit
from ddp_hpc.cluster.slurm import client
from ddp_hpc.cluster.slurm.own_job import TO_DO, Standing, standing
from ddp_hpc.cluster.slurm.queries import Partition
from ddp_hpc.run.config.resolve import Resolved
from ddp_hpc.run.run_dir.environment import capture
from ddp_hpc.run.run_dir.preflight import Finding, Level
from ddp_hpc.run.spec import RunSpec
from ddp_hpc.watch.diagnose.doctor import preemption, quota
from ddp_hpc.watch.diagnose.doctor.drained import groups, out_of_service
from ddp_hpc.watch.diagnose.doctor.questions import SlurmAnswers, ask, has_commands

_NEVER_S = 180 * 86400.0
"""With jobs before it that may run for ever, Slurm's estimates are years ahead."""


@dataclass(frozen=True)
class LoginSite:
    """A login node, and what a run of this configuration would ask of its cluster."""

    resolved: Resolved
    environ: Mapping[str, str]
    proc: Path = Path("/proc")
    """The kernel's files on itself and its drivers."""

    @property
    def spec(self) -> RunSpec:
        """The configuration that a run would have."""
        return self.resolved.spec

    @cached_property
    def told(self) -> SlurmAnswers:
        """What the cluster and the file system answered."""
        return ask(self.spec, self.environ)

    @property
    def has_slurm(self) -> bool:
        return has_commands(self.environ) and self.told.controller != "none"

    @property
    def partition(self) -> Partition | None:
        """The partition that the job would be in; None where it is not known."""
        asked, known = self.spec.slurm.partition, self.told.partitions
        return next((one for one in known or () if (one.name == asked if asked else one.is_default)), None)

    @cached_property
    def job(self) -> tuple[Standing, str]:
        """Whether the job of this shell's variables runs, and why that is so."""
        is_answered = "job" not in self.told.problems and has_commands(self.environ)
        asked = "" if self.told.config is None else self.told.config.name
        problem = "" if is_answered else self.told.why_not("job")
        return standing(self.environ, self.told.job, problem, asked=asked)


def findings_of(site: LoginSite) -> list[Finding]:
    """Return what all checks found, in the order of the table."""
    checks: Sequence[Callable[[LoginSite], Iterator[Finding]]] = [
        *ALWAYS,
        *(OF_SLURM if site.has_slurm else [_no_slurm]),
    ]
    return [finding for check in checks for finding in check(site)]


def why_no_job(site: LoginSite, findings: Sequence[Finding]) -> str:
    """Return why a job that checks nodes would not start, or must not be submitted; empty where it may."""
    if site.job[0] == "unknown":
        return "ddp-hpc does not know whether this shell is in a running job"
    if site.job[0] == "runs":
        return ""
    if any(one.check == "controller" for one in findings):
        return "the controller does not answer"
    is_refused = any(one.level == "fail" and one.check in _BEFORE_A_JOB for one in findings)
    return "Slurm would not start the job: see the failures above" if is_refused else ""


_BEFORE_A_JOB = frozenset({"partition", "nodes", "start"})


def _profile(site: LoginSite) -> Iterator[Finding]:
    profile = site.resolved.profile
    if profile is None:
        to_do = "`ddp-hpc site init` drafts one from this cluster's settings"
        yield Finding(check="site", level="warn", found="no site profile applies to this host", to_do=to_do)
    else:
        yield Finding(check="site", level="ok", found=f"{profile.site.name}: {profile.path} ({profile.why})")


def _job(site: LoginSite) -> Iterator[Finding]:
    is_so, said = site.job
    if is_so == "runs":
        yield Finding(check="job", level="ok", found=f"{said}; `--nodes` checks its nodes")
    elif is_so == "gone":
        yield Finding(check="job", level="warn", found=said, to_do=TO_DO)
    elif is_so == "unknown":
        to_do = "try again, or open a new shell; until this is known, `--nodes` checks no nodes"
        yield Finding(check="job", level="unknown", found=said, to_do=to_do)


def _driver(site: LoginSite) -> Iterator[Finding]:
    here = asdict(capture(site.environ, proc=site.proc))
    if site.spec.container.image or not here["torch"] or not (here["driver"] or site.spec.resources.gpus_per_node):
        return  # an image has a PyTorch of its own
    if found := misfit(here):
        yield Finding(check="driver", level="warn", found=found, to_do=TO_FIT)
    elif here["driver"]:
        built = f"CUDA {here['cuda']}" if here["cuda"] else f"ROCm {here['hip']}"
        found = f"{here['driver']} runs PyTorch {here['torch']}, built with {built}"
        yield Finding(check="driver", level="ok", found=found)
    else:
        found = f"this host has no driver of NVIDIA's that PyTorch {here['torch']} could be compared with"
        yield Finding(check="driver", level="unknown", found=found, to_do="`--nodes` compares them on nodes")


_ROOM = "free space: delete runs that you no longer need (`ddp-hpc delete RUN`)"
_FASTER = "set `runs_dir` to a directory on a faster file system, if there is one"


def _runs_dir(site: LoginSite) -> Iterator[Finding]:
    place = site.spec.path.parent
    if site.told.disk is None:
        found = f"{place}: {site.told.why_not('disk')}"
        to_do = "run `ls` on this directory; if that does not answer either, tell your cluster's support"
        yield Finding(check="runs directory", level="unknown", found=found, to_do=to_do)
        return
    existing, found_there = site.told.disk
    where = f"{place}" if existing == place else f"{place} (does not exist yet; {existing} does)"
    if found_there.error:
        yield Finding(
            check="runs directory",
            level="fail",
            found=f"{where} cannot be written: {found_there.error}",
            to_do="set `runs_dir` to a directory of yours that all nodes share, or free space of your quota",
        )
        return
    free = found_there.free_bytes or 0
    level: Level = "fail" if free < FULL_BYTES else "warn" if free < TIGHT_BYTES else "ok"
    if found_there.free_files is not None and found_there.free_files < FEW_FILES:
        level = "fail"
    files = "" if found_there.free_files is None else f", {found_there.free_files} files"
    seconds = f" in {found_there.write_s:.1f} s" if found_there.write_s > SLOW_WRITE_S else ""
    if seconds and level == "ok":
        level = "warn"
    yield Finding(
        check="runs directory",
        level=level,
        found=f"{where}: writable{seconds}, {quota.in_words(free)}{files} free",
        to_do="" if level == "ok" else _ROOM if free < TIGHT_BYTES or level == "fail" else _FASTER,
    )


def _quota(site: LoginSite) -> Iterator[Finding]:
    yield from quota.findings_of(site.told.quota, site.told.why_not("quota"))


def _no_slurm(site: LoginSite) -> Iterator[Finding]:
    del site
    yield Finding(
        check="Slurm",
        level="unknown",
        found="this host has no Slurm that finds a cluster",
        to_do="go to a login node, or load the Slurm module",
    )


def _controller(site: LoginSite) -> Iterator[Finding]:
    said = site.told.controller
    if said == "up":
        return  # the next lines say what it answers
    to_do = "try again; if it lasts, ask your cluster's support"
    if said == "down":
        found = "the controller does not answer: `scontrol ping` says DOWN"
        to_do = "wait, or ask your cluster's support; no job starts meanwhile, and those that run go on"
        yield Finding(check="controller", level="fail", found=found, to_do=to_do)
    else:
        why = site.told.why_not("controller") if said is None else "`scontrol ping` says neither UP nor DOWN"
        yield Finding(check="controller", level="unknown", found=f"the controller does not answer: {why}", to_do=to_do)


def _version(site: LoginSite) -> Iterator[Finding]:
    config = site.told.config
    if config is None or not config.version:
        yield _unanswered(site, "Slurm", "config")
        return
    yield Finding(check="Slurm", level="ok", found=f"{config.version}, cluster {config.name}")


def _partition(site: LoginSite) -> Iterator[Finding]:
    partition = site.partition
    if site.told.partitions is None:
        yield _unanswered(site, "partition", "partitions")
    elif partition is None:
        to_do = "set `slurm.partition` to one of " + ", ".join(one.name for one in site.told.partitions)
        asked = site.spec.slurm.partition
        what = f"there is no partition {asked!r}" if asked else "Slurm has no default partition"
        yield Finding(check="partition", level="fail", found=what, to_do=to_do)
    else:
        up = "" if partition.is_up else ", but it is not UP: Slurm starts no job there"
        yield Finding(
            check="partition",
            level="ok" if partition.is_up else "fail",
            found=f"{partition.name}, {partition.total_nodes} nodes{up}",
            to_do="" if partition.is_up else "choose another partition, or wait until it is UP",
        )


def _preemption(site: LoginSite) -> Iterator[Finding]:
    config, partition, told = site.told.config, site.partition, site.told
    if config is None or told.partitions is None:
        yield _unanswered(site, "preemption", "partitions" if config else "config")
        return
    if partition is None:
        return  # the line before says so
    slurm = site.spec.slurm
    qos = preemption.qos_of(slurm.qos, slurm.account, partition.name, told.associations or ())
    rules = preemption.rules_of(config, partition, told.partitions, qos, told.qos)
    if rules is None:
        why = told.why_not("qos") if told.qos is None else "which QOS the job would have is not known"
        found = f"PreemptType is {config.preempt_type or 'not shown'}; whether other jobs may preempt this run is not known: {why}"
        lists = "`sacctmgr show qos format=name,preempt,preemptmode,gracetime` lists the rules"
        to_do = f"try again; {lists}" if told.qos is None else f"set `slurm.qos`; {lists}"
        yield Finding(check="preemption", level="unknown", found=found, to_do=to_do)
        return
    yield from preemption.findings_of(rules, config)


def _requeue(site: LoginSite) -> Iterator[Finding]:
    config = site.told.config
    if config is None:
        yield _unanswered(site, "requeue", "config")
    elif not site.spec.slurm.requeue:
        to_do = "set `slurm.requeue=true`, or submit the run again after each end"
        yield Finding(
            check="requeue", level="warn", found="`slurm.requeue` is false, so the run ends with its job", to_do=to_do
        )
    else:
        default = (
            "by default" if config.job_requeue else "on request (JobRequeue=0), and ddp-hpc requests it for each job"
        )
        yield Finding(check="requeue", level="ok", found=f"Slurm requeues jobs {default}")


def _arrays(site: LoginSite) -> Iterator[Finding]:
    size = None if site.told.config is None else site.told.config.max_array_size
    if size is None:
        yield _unanswered(site, "job arrays", "config")
    elif size <= 1:
        yield Finding(
            check="job arrays",
            level="warn",
            found=f"MaxArraySize is {size}: Slurm allows no job arrays, so sweeps do not work on it",
        )
    else:
        yield Finding(
            check="job arrays",
            level="ok",
            found=f"MaxArraySize is {size}: a sweep may have {size - 1} points in one array",
        )


def _accounts(site: LoginSite) -> Iterator[Finding]:
    config, known = site.told.config, site.told.associations
    if config is not None and not config.has_accounting:
        yield Finding(check="accounts", level="ok", found="this cluster has no accounting, so jobs need no account")
        return
    if known is None:
        yield _unanswered(site, "accounts", "associations")
        return
    if not known:
        found = f"the accounting database has no account for {client.user_name()}"
        yield Finding(check="accounts", level="warn", found=found, to_do="ask your administrators for one")
        return
    asked = site.spec.slurm.account
    names = [one.account for one in known]
    is_known = asked is None or asked in names
    yield Finding(
        check="accounts",
        level="ok" if is_known else "fail",
        found="; ".join(one.words for one in known)
        + ("" if is_known else f"; not {asked!r}, which `slurm.account` names"),
        to_do="" if is_known else f"set `slurm.account` to one of {', '.join(names)}",
    )


def _start(site: LoginSite) -> Iterator[Finding]:
    answer, count = site.told.test_only, site.spec.resources.nodes
    nodes = "1 node" if count == 1 else f"{count} nodes"
    if answer is None:
        yield _unanswered(site, "start", "test_only")
    elif answer.refusal is not None:
        last = answer.refusal.splitlines()[-1] if answer.refusal else "it gave no reason"
        yield Finding(
            check="start",
            level="fail",
            found=f"Slurm would refuse a job of {nodes}: {last}",
            to_do="correct the setting that Slurm names",
        )
    elif answer.starts_at is None:
        yield Finding(
            check="start",
            level="unknown",
            found=f"Slurm would take a job of {nodes}, but does not say when it would start",
            to_do="",
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


def _nodes(site: LoginSite) -> Iterator[Finding]:
    nodes = site.told.nodes
    if nodes is None:
        yield _unanswered(site, "nodes", "nodes")
        return
    if not nodes:
        to_do = "a policy of the site may hide the nodes (PrivateData): `sinfo` shows what you may see; Slurm's estimate below counts"
        yield Finding(check="nodes", level="unknown", found="Slurm shows this user no node", to_do=to_do)
        return
    bad = out_of_service(nodes)
    num_good = len(nodes) - len(bad)
    where = f" of partition {site.spec.slurm.partition}" if site.spec.slurm.partition else ""
    needed = site.spec.resources.nodes
    yield Finding(
        check="nodes",
        level="ok" if num_good >= needed else "fail",
        found=f"{num_good} of {len(nodes)} nodes{where} take jobs; the run asks for {needed}",
        to_do="" if num_good >= needed else "ask for fewer nodes, or for another partition",
    )
    reasons = groups(bad)
    # A line that says that there is one more is no shorter than that one's own.
    num_shown = _MOST_GROUPS if len(reasons) > _MOST_GROUPS + 1 else len(reasons)
    for of_one in reasons[:num_shown]:
        one, names = of_one[0], tuple(each.node for each in of_one)
        reason = f": {one.reason}" if one.reason else ", without a reason"
        shown = f"{', '.join(names[:_MOST_NAMES])} and {len(names) - _MOST_NAMES} more are"
        who = f"{one.node} is" if len(names) == 1 else shown if len(names) > _MOST_NAMES else f"{', '.join(names)} are"
        yield Finding(check="nodes", level="warn", found=f"{who} {one.state}{reason}", to_do=one.means, nodes=names)
    if rest := reasons[num_shown:]:
        names = tuple(each.node for of_one in rest for each in of_one)
        found = f"{len(names)} more nodes are out of service, for {len(rest)} other reasons"
        yield Finding(check="nodes", level="warn", found=found, to_do="`sinfo --list-reasons` lists them", nodes=names)


_MOST_NAMES = 4
_MOST_GROUPS = 8
"""How many reasons are shown, of most nodes first, and how many of the nodes that have one."""


def _unanswered(site: LoginSite, check: str, question: str) -> Finding:
    to_do = _OF_DATABASE if question == "associations" else "try again; `scontrol ping` says more"
    if "denied" in site.told.why_not(question).lower():
        to_do = (
            "a policy of the site keeps this from its users (PrivateData, or an access list): ask your administrators"
        )
    return Finding(check=check, level="unknown", found=site.told.why_not(question), to_do=to_do)


_OF_DATABASE = (
    "try again; the accounting daemon (slurmdbd) must answer this; meanwhile, Slurm still accepts and starts jobs"
)


ALWAYS: Sequence[Callable[[LoginSite], Iterator[Finding]]] = (_profile, _job, _driver, _runs_dir, _quota)
OF_SLURM: Sequence[Callable[[LoginSite], Iterator[Finding]]] = (
    _controller,
    _version,
    _partition,
    _preemption,
    _requeue,
    _arrays,
    _accounts,
    _nodes,
    _start,
)
"""In the order in which a person should read them."""
