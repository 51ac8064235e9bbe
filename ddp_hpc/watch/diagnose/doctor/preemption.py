"""By which rule Slurm preempts the jobs of a partition and a QOS, and what a run gets to notice of it. Pure.

Which of two settings counts depends on `PreemptType`: with `preempt/partition_prio`, mode and GraceTime are the partition's, and jobs of
a higher PriorityTier preempt; with `preempt/qos`, both are the QOS's, and a QOS preempts those that its `Preempt` names. Where
the partition, or the QOS, sets no mode, `PreemptMode` of the cluster counts. https://slurm.schedmd.com/preempt.html;
src/plugins/preempt of Slurm's source says the same of GraceTime, which has no such default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_hpc.cluster.slurm.directives import STOP_SIGNAL
from ddp_hpc.cluster.slurm.queries import Association, ClusterConfig, Partition, Qos
from ddp_hpc.watch.diagnose.doctor.answer import DoctorAnswer

_ADDED = frozenset({"GANG", "PRIORITY", "WITHIN"})
"""Words of PreemptMode that say what else is considered, and not what becomes of a preempted job."""
_DEFAULT_QOS = "normal"
"""The QOS of a job where neither its user nor its account says one, and they may use several."""


@dataclass(frozen=True, kw_only=True)
class PreemptionRule:
    """How a job is preempted."""

    mode: str
    """OFF, REQUEUE, CANCEL or SUSPEND, or a word of a later Slurm."""
    grace_s: int = 0
    of: str
    """Whose rule it is: `partition low`, `QOS low`."""
    by: tuple[str, ...] = ()
    """Whose jobs may preempt it."""


def qos_of(asked: str | None, account: str | None, partition: str, known: Sequence[Association]) -> list[str]:
    """Return the QOS that a job would have: more than one where the accounts of the user differ, none where nothing is known.

    The rules are those of `assoc_mgr_get_default_qos_info` in Slurm's source.
    """
    if asked:
        return [asked]
    mine = [one for one in known if one.account == account or account is None]
    here = [one for one in mine if one.partition == partition] or [one for one in mine if not one.partition]
    found = [one.default_qos or (one.qos[0] if len(one.qos) == 1 else _DEFAULT_QOS) for one in here]
    return list(dict.fromkeys(found))


def _mode(*texts: str) -> str:
    """Return the first mode that is set."""
    text = next((text for text in texts if text), "OFF")
    return next((word for word in text.upper().split(",") if word not in _ADDED), "OFF")


def of_partition(partition: Partition, partitions: Sequence[Partition], config: ClusterConfig) -> PreemptionRule:
    """Return the rule of a partition, with `preempt/partition_prio`."""
    above = tuple(f"partition {one.name}" for one in partitions if one.priority_tier > partition.priority_tier)
    mode = _mode(partition.preempt_mode, config.preempt_mode)
    return PreemptionRule(mode=mode, grace_s=partition.grace_time_s, of=f"partition {partition.name}", by=above)


def of_qos(qos: Qos, all_qos: Sequence[Qos], config: ClusterConfig) -> PreemptionRule:
    """Return the rule of a QOS, with `preempt/qos`."""
    within = "WITHIN" in f"{qos.preempt_mode},{config.preempt_mode}".upper().split(",")
    above = [f"QOS {one.name}" for one in all_qos if qos.name in one.preempts]
    by = (*above, *([f"QOS {qos.name} of a higher priority"] if within else []))
    mode = _mode(qos.preempt_mode, config.preempt_mode)
    return PreemptionRule(mode=mode, grace_s=qos.grace_time_s, of=f"QOS {qos.name}", by=by)


def rules_of(
    config: ClusterConfig,
    partition: Partition,
    partitions: Sequence[Partition],
    qos: Sequence[str],
    all_qos: Sequence[Qos] | None,
) -> list[PreemptionRule] | None:
    """Return the rules that may apply to a job of this partition and QOS; None where that is not known."""
    if config.preempt_type == "preempt/none":
        return [PreemptionRule(mode="OFF", of="the cluster (PreemptType)")]
    if config.preempt_type == "preempt/partition_prio":
        return [of_partition(partition, partitions, config)]
    if config.preempt_type == "preempt/qos" and all_qos is not None:
        named = {one.name: one for one in all_qos}
        known = [of_qos(named[name], all_qos, config) for name in qos if name in named]
        return known if known and len(known) == len(qos) else None
    return None


def answer_of(rule: PreemptionRule, config: ClusterConfig) -> DoctorAnswer:
    """Return what a rule means for a run."""
    if rule.mode == "OFF":
        return DoctorAnswer("ok", f"PreemptMode is OFF in {rule.of}: a run there is not preempted")
    if not rule.by:
        found = f"PreemptMode is {rule.mode} in {rule.of}, but no partition or QOS has a higher rank, so no job would preempt a run there"
        return DoctorAnswer("ok", found)
    by = f"PreemptMode is {rule.mode}, GraceTime {rule.grace_s} s, by {rule.of}; jobs of {', '.join(rule.by)} may preempt a run there"
    if rule.mode == "SUSPEND":
        found = f"{by}: Slurm suspends the run without a warning signal until those jobs end"
        to_do = "the run's GPU memory stays in use meanwhile; to avoid this, choose another partition or QOS"
        return DoctorAnswer("warn", found, to_do)
    kill_wait = "KillWait" if config.kill_wait_s is None else f"{config.kill_wait_s} s (KillWait)"
    asked = f"the run's own signal, SIG{STOP_SIGNAL}," if config.sends_user_signal else "SIGTERM"
    if rule.grace_s:
        found = f"{by}: {asked} comes at once, SIGKILL after {rule.grace_s} s and {kill_wait} more"
    else:
        found = f"{by}: SIGTERM comes at once, SIGKILL {kill_wait} later"
    if rule.mode == "CANCEL":
        to_do = "Slurm does not start a cancelled job again: if the run has not requeued itself in that time, submit it again"
        return DoctorAnswer("warn", found, to_do)
    if not rule.grace_s:
        to_do = f"a checkpoint that takes longer than {kill_wait} is lost, with the steps since the previous one: lower `checkpoint.every_steps`"
        return DoctorAnswer("warn", found, to_do)
    return DoctorAnswer("ok", found)
