"""What a login node says of its site: one check a row of `CHECKS`. Slurm is asked once for each answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from ddp_hpc.base.names import plural, shorten_names
from ddp_hpc.cluster.node_checks.of_files import FEW_FILES, FULL_BYTES, SLOW_WRITE_S, TIGHT_BYTES
from ddp_hpc.cluster.node_checks.of_node import DRIVER_ADVICE, why_gpus_unused
from ddp_hpc.cluster.slurm import client, preemption
from ddp_hpc.cluster.slurm.own_job import SHELL_ADVICE, JobStanding, standing_of_job
from ddp_hpc.cluster.slurm.queries import NEVER_S, NodeState, Partition, chosen_partition, takes_jobs
from ddp_hpc.run.config.resolve import Resolved
from ddp_hpc.run.run_dir.preflight import Finding, Level
from ddp_hpc.run.run_dir.software_versions import environment_here
from ddp_hpc.run.spec import RunSpec
from ddp_hpc.watch.diagnose.doctor import quota
from ddp_hpc.watch.diagnose.doctor.questions import SlurmAnswers, ask, has_commands


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
    def slurm_answers(self) -> SlurmAnswers:
        """What the cluster and the file system answered."""
        return ask(self.spec, self.environ)

    @property
    def has_slurm(self) -> bool:
        return has_commands(self.environ) and self.slurm_answers.controller != "none"

    @property
    def partition(self) -> Partition | None:
        """The partition that the job would be in; None where it is not known."""
        return chosen_partition(self.spec.slurm.partition, self.slurm_answers.partitions or ())

    @cached_property
    def job_standing(self) -> tuple[JobStanding, str]:
        """Whether the job of this shell's variables runs, and why that is so."""
        is_answered = "job" not in self.slurm_answers.problems and has_commands(self.environ)
        asked = "" if self.slurm_answers.config is None else self.slurm_answers.config.name
        problem = "" if is_answered else self.slurm_answers.why_not("job")
        return standing_of_job(self.environ, self.slurm_answers.job, problem, asked=asked)


def findings_of(site: LoginSite) -> list[Finding]:
    """Return what all checks found, in the order of the table."""
    checks = [*ALWAYS_CHECKS, *(SLURM_CHECKS if site.has_slurm else ())]
    found = [replace(one, check=name) for name, check in checks for one in check(site)]
    if not site.has_slurm:
        to_do = "go to a login node, or load the Slurm module"
        found.append(Finding("unknown", "this host has no Slurm that finds a cluster", to_do, check="Slurm"))
    return found


def why_no_job(site: LoginSite, findings: Sequence[Finding]) -> str:
    """Return why a job that checks nodes would not start, or must not be submitted; empty where it may."""
    if site.job_standing[0] == "unknown":
        return "ddp-hpc does not know whether this shell is in a running job"
    if site.job_standing[0] == "runs":
        return ""
    if any(one.check == "controller" for one in findings):
        return "the controller does not answer"
    is_refused = any(one.level == "fail" and one.check in _BLOCKING_CHECKS for one in findings)
    return "Slurm would not start the job: see the failures above" if is_refused else ""


_BLOCKING_CHECKS = frozenset({"partition", "nodes", "start"})


def _check_profile(site: LoginSite) -> Iterator[Finding]:
    profile = site.resolved.profile
    if profile is None:
        to_do = "`ddp-hpc site init` drafts one from this cluster's settings"
        yield Finding("warn", "no site profile applies to this host", to_do)
    else:
        yield Finding("ok", f"{profile.site.name}: {profile.path} ({profile.why})")


def _check_shells_job(site: LoginSite) -> Iterator[Finding]:
    is_so, said = site.job_standing
    if is_so == "runs":
        yield Finding("ok", f"{said}; `--nodes` checks its nodes")
    elif is_so == "gone":
        yield Finding("warn", said, SHELL_ADVICE)
    elif is_so == "unknown":
        yield Finding("unknown", said, "try again, or open a new shell; until this is known, `--nodes` checks no nodes")


def _check_driver(site: LoginSite) -> Iterator[Finding]:
    here = asdict(environment_here(site.environ, proc=site.proc))
    if site.spec.container.image or not here["torch"] or not (here["driver"] or site.spec.resources.gpus_per_node):
        return  # an image has a PyTorch of its own
    if found := why_gpus_unused(here):
        yield Finding("warn", found, DRIVER_ADVICE)
    elif here["driver"]:
        built = f"CUDA {here['cuda']}" if here["cuda"] else f"ROCm {here['hip']}"
        yield Finding("ok", f"{here['driver']} runs PyTorch {here['torch']}, built with {built}")
    else:
        found = f"this host has no driver of NVIDIA's that PyTorch {here['torch']} could be compared with"
        yield Finding("unknown", found, "`--nodes` compares them on nodes")


_SPACE_ADVICE = "free space: delete runs that you no longer need (`ddp-hpc delete RUN`)"
_SPEED_ADVICE = "set `runs_dir` to a directory on a faster file system, if there is one"


def _check_runs_dir(site: LoginSite) -> Iterator[Finding]:
    place = site.spec.path.parent
    if site.slurm_answers.disk is None:
        to_do = "run `ls` on this directory; if that does not answer either, tell your cluster's support"
        yield Finding("unknown", f"{place}: {site.slurm_answers.why_not('disk')}", to_do)
        return
    existing, found_there = site.slurm_answers.disk
    where = f"{place}" if existing == place else f"{place} (does not exist yet; {existing} does)"
    if found_there.error:
        to_do = "set `runs_dir` to a directory of yours that all nodes share, or free space of your quota"
        yield Finding("fail", f"{where} cannot be written: {found_there.error}", to_do)
        return
    free = found_there.free_bytes or 0
    is_full = free < FULL_BYTES or (found_there.free_files is not None and found_there.free_files < FEW_FILES)
    files = "" if found_there.free_files is None else f", {found_there.free_files} files"
    seconds = f" in {found_there.write_s:.1f} s" if found_there.write_s > SLOW_WRITE_S else ""
    level: Level = "fail" if is_full else "warn" if free < TIGHT_BYTES or seconds else "ok"
    to_do = "" if level == "ok" else _SPACE_ADVICE if free < TIGHT_BYTES or is_full else _SPEED_ADVICE
    yield Finding(level, f"{where}: writable{seconds}, {quota.size_text(free)}{files} free", to_do)


def _check_controller(site: LoginSite) -> Iterator[Finding]:
    said = site.slurm_answers.controller
    if said == "up":
        return  # the next lines say what it answers
    if said == "down":
        to_do = "wait, or ask your cluster's support; no job starts meanwhile, and those that run go on"
        yield Finding("fail", "the controller does not answer: `scontrol ping` says DOWN", to_do)
    else:
        why = site.slurm_answers.why_not("controller") if said is None else "`scontrol ping` says neither UP nor DOWN"
        to_do = "try again; if it lasts, ask your cluster's support"
        yield Finding("unknown", f"the controller does not answer: {why}", to_do)


def _check_version(site: LoginSite) -> Iterator[Finding]:
    config = site.slurm_answers.config
    if config is not None and config.version:
        yield Finding("ok", f"{config.version}, cluster {config.name}")
    else:
        yield _unknown_finding(site, "config")


def _check_partition(site: LoginSite) -> Iterator[Finding]:
    partition = site.partition
    if site.slurm_answers.partitions is None:
        yield _unknown_finding(site, "partitions")
    elif partition is None:
        asked = site.spec.slurm.partition
        what = f"there is no partition {asked!r}" if asked else "Slurm has no default partition"
        names = ", ".join(one.name for one in site.slurm_answers.partitions)
        yield Finding("fail", what, f"set `slurm.partition` to one of {names}")
    elif partition.is_up:
        yield Finding("ok", f"{partition.name}, {partition.total_nodes} nodes")
    else:
        found = f"{partition.name}, {partition.total_nodes} nodes, but it is not UP: Slurm starts no job there"
        yield Finding("fail", found, "choose another partition, or wait until it is UP")


def _check_preemption(site: LoginSite) -> Iterator[Finding]:
    config, partition, told = site.slurm_answers.config, site.partition, site.slurm_answers
    if config is None or told.partitions is None:
        yield _unknown_finding(site, "partitions" if config else "config")
        return
    if partition is None:
        return  # the line before says so
    slurm = site.spec.slurm
    qos = preemption.qos_of(slurm.qos, slurm.account, partition.name, told.associations or ())
    answers = preemption.findings_on_preemption(config, partition, told.partitions, qos, told.qos)
    if answers is None:
        why = told.why_not("qos") if told.qos is None else "which QOS the job would have is not known"
        found = f"PreemptType is {config.preempt_type or 'not shown'}; whether other jobs may preempt this run is not known: {why}"
        lists = "`sacctmgr show qos format=name,preempt,preemptmode,gracetime` lists the rules"
        to_do = f"try again; {lists}" if told.qos is None else f"set `slurm.qos`; {lists}"
        yield Finding("unknown", found, to_do)
        return
    yield from answers


def _check_requeue(site: LoginSite) -> Iterator[Finding]:
    config = site.slurm_answers.config
    if config is None:
        yield _unknown_finding(site, "config")
    elif not site.spec.slurm.requeue:
        to_do = "set `slurm.requeue=true`, or submit the run again after each end"
        yield Finding("warn", "`slurm.requeue` is false, so the run ends with its job", to_do)
    else:
        asked = "on request (JobRequeue=0), and ddp-hpc requests it for each job"
        yield Finding("ok", f"Slurm requeues jobs {'by default' if config.job_requeue else asked}")


def _check_arrays(site: LoginSite) -> Iterator[Finding]:
    size = None if site.slurm_answers.config is None else site.slurm_answers.config.max_array_size
    if size is None:
        yield _unknown_finding(site, "config")
    elif size <= 1:
        yield Finding("warn", f"MaxArraySize is {size}: Slurm allows no job arrays, so sweeps do not work on it")
    else:
        yield Finding("ok", f"MaxArraySize is {size}: a sweep may have {size - 1} points in one array")


def _check_accounts(site: LoginSite) -> Iterator[Finding]:
    config, known, asked = site.slurm_answers.config, site.slurm_answers.associations, site.spec.slurm.account
    if config is not None and not config.has_accounting:
        yield Finding("ok", "this cluster has no accounting, so jobs need no account")
    elif known is None:
        yield _unknown_finding(site, "associations")
    elif not known:
        found = f"the accounting database has no account for {client.user_name()}"
        yield Finding("warn", found, "ask your administrators for one")
    else:
        names, words = [one.account for one in known], "; ".join(one.words for one in known)
        if asked is None or asked in names:
            yield Finding("ok", words)
        else:
            to_do = f"set `slurm.account` to one of {', '.join(names)}"
            yield Finding("fail", f"{words}; not {asked!r}, which `slurm.account` names", to_do)


def _check_start(site: LoginSite) -> Iterator[Finding]:
    answer, nodes = site.slurm_answers.test_only, plural(site.spec.resources.nodes, "node")
    if answer is None:
        yield _unknown_finding(site, "test_only")
    elif answer.refusal is not None:
        last = answer.refusal.splitlines()[-1] if answer.refusal else "it gave no reason"
        found = f"Slurm would refuse a job of {nodes}: {last}"
        yield Finding("fail", found, "correct the setting that Slurm names")
    elif answer.starts_at is None:
        yield Finding("unknown", f"Slurm would take a job of {nodes}, but does not say when it would start")
    else:
        wait_s = max(answer.starts_at - time.time(), 0.0)
        when = f"in about {wait_s / 60:.0f} min" if wait_s > 60 else "at once"
        when = "not within half a year" if wait_s > NEVER_S else when
        where = f" on {answer.nodes}" if answer.nodes else ""
        found = f"a job of {nodes} would start {when}{where}, by Slurm's estimate"
        yield Finding("warn" if wait_s > NEVER_S else "ok", found)


def _check_nodes(site: LoginSite) -> Iterator[Finding]:
    nodes = site.slurm_answers.nodes
    if nodes is None:
        yield _unknown_finding(site, "nodes")
        return
    if not nodes:
        to_do = "a policy of the site may hide the nodes (PrivateData): `sinfo` shows what you may see; Slurm's estimate below counts"
        yield Finding("unknown", "Slurm shows this user no node", to_do)
        return
    reasons = nodes_by_reason(nodes)
    num_good = len(nodes) - sum(map(len, reasons))
    where = f" of partition {site.spec.slurm.partition}" if site.spec.slurm.partition else ""
    needed = site.spec.resources.nodes
    found = f"{num_good} of {len(nodes)} nodes{where} take jobs; the run asks for {needed}"
    if num_good >= needed:
        yield Finding("ok", found)
    else:
        yield Finding("fail", found, "ask for fewer nodes, or for another partition")
    # A line that says that there is one more is no shorter than that one's own.
    num_shown = _MOST_GROUPS if len(reasons) > _MOST_GROUPS + 1 else len(reasons)
    for of_one in reasons[:num_shown]:
        one, names = of_one[0], tuple(each.node for each in of_one)
        reason = f": {one.reason}" if one.reason else ", without a reason"
        who = f"{shorten_names(names, _MOST_NAMES)} {'is' if len(names) == 1 else 'are'}"
        yield Finding("warn", f"{who} {one.state}{reason}", reason_meaning(one.reason, one.state), names)
    if rest := reasons[num_shown:]:
        names = tuple(each.node for of_one in rest for each in of_one)
        found = f"{len(names)} more nodes are out of service, for {len(rest)} other reasons"
        yield Finding("warn", found, "`sinfo --list-reasons` lists them", names)


_MOST_NAMES = 4
_MOST_GROUPS = 8
"""How many reasons are shown, of most nodes first, and how many of the nodes that have one."""

_MEANING_BY_PREFIX = {
    "[node_problem]": "the node has failed a check of hardware or system; the administrators must repair it",
    "[user_problem]": "a user's processes made the node unusable, for instance with a full disk or memory; Slurm's reason says which",
}
"""How some sites' checks begin a reason (Soperator of Nebius writes these two) -> what it means."""
_SILENT_MEANING = "`*` means that the node's slurmd does not answer the controller: the node is down, or its network is"
_OTHERS = "this reason is the text of an administrator or of Slurm; ask your cluster's support"


def nodes_by_reason(nodes: Sequence[NodeState]) -> list[list[NodeState]]:
    """Return the nodes that take no jobs by state and reason, the largest group first: hundreds may be down for one reason."""
    found: dict[tuple[str, str], list[NodeState]] = {}
    for one in nodes:
        if not takes_jobs(one.state):
            found.setdefault((one.state, one.reason), []).append(one)
    return sorted(found.values(), key=len, reverse=True)


def reason_meaning(reason: str, state: str = "") -> str:
    """Return what a reason means; without one, what the state does. Empty where neither says anything."""
    if not reason:
        return _SILENT_MEANING if state.endswith("*") else ""
    return next((text for prefix, text in _MEANING_BY_PREFIX.items() if reason.lower().startswith(prefix)), _OTHERS)


def _unknown_finding(site: LoginSite, question: str) -> Finding:
    to_do = "try again; `scontrol ping` says more"
    if question == "associations":
        to_do = "try again; the accounting daemon (slurmdbd) must answer this; meanwhile, Slurm still accepts and starts jobs"
    if "denied" in site.slurm_answers.why_not(question).lower():
        who = "a policy of the site keeps this from its users (PrivateData, or an access list)"
        to_do = f"{who}: ask your administrators"
    return Finding("unknown", site.slurm_answers.why_not(question), to_do)


Checks = Sequence[tuple[str, Callable[[LoginSite], Iterator[Finding]]]]
ALWAYS_CHECKS: Checks = (
    ("site", _check_profile),
    ("job", _check_shells_job),
    ("driver", _check_driver),
    ("runs directory", _check_runs_dir),
    ("quota", lambda site: quota.findings_on_quota(site.slurm_answers.quota, site.slurm_answers.why_not("quota"))),
)
SLURM_CHECKS: Checks = (
    ("controller", _check_controller),
    ("Slurm", _check_version),
    ("partition", _check_partition),
    ("preemption", _check_preemption),
    ("requeue", _check_requeue),
    ("job arrays", _check_arrays),
    ("accounts", _check_accounts),
    ("nodes", _check_nodes),
    ("start", _check_start),
)
"""In the order in which a person should read them."""
