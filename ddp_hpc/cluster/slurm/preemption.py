"""By which rule Slurm preempts the jobs of a partition and a QOS, and what a run gets to notice of it. Pure.

Which of two settings counts depends on `PreemptType`: with `preempt/partition_prio`, mode and GraceTime are the partition's, and jobs of
a higher PriorityTier preempt; with `preempt/qos`, both are the QOS's, and a QOS preempts those that its `Preempt` names. Where
the partition, or the QOS, sets no mode, `PreemptMode` of the cluster counts. https://slurm.schedmd.com/preempt.html;
src/plugins/preempt of Slurm's source says the same of GraceTime, which has no such default.
"""

from __future__ import annotations

from collections.abc import Sequence

from ddp_hpc.cluster.slurm.directives import STOP_SIGNAL
from ddp_hpc.cluster.slurm.queries import Association, ClusterConfig, Partition, Qos
from ddp_hpc.run.run_dir.preflight import Finding

_MODE_MODIFIERS = frozenset({"GANG", "PRIORITY", "WITHIN"})
"""Words of PreemptMode that say what else is considered, and not what becomes of a preempted job."""
_DEFAULT_QOS = "normal"
"""The QOS of a job where neither its user nor its account says one, and they may use several."""


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
    return next((word for word in text.upper().split(",") if word not in _MODE_MODIFIERS), "OFF")


def findings_on_preemption(
    config: ClusterConfig,
    partition: Partition,
    partitions: Sequence[Partition],
    qos: Sequence[str],
    all_qos: Sequence[Qos] | None,
) -> list[Finding] | None:
    """Return what each rule that may apply to a job of this partition and QOS means for a run; None where they are not known."""
    if config.preempt_type == "preempt/none":
        return [_finding("OFF", 0, "the cluster (PreemptType)", [], config)]
    if config.preempt_type == "preempt/partition_prio":
        above = [f"partition {one.name}" for one in partitions if one.priority_tier > partition.priority_tier]
        mode = _mode(partition.preempt_mode, config.preempt_mode)
        return [_finding(mode, partition.grace_time_s, f"partition {partition.name}", above, config)]
    if config.preempt_type == "preempt/qos" and all_qos is not None:
        known = [one for name in qos for one in all_qos if one.name == name]
        return [_finding_of_qos(one, all_qos, config) for one in known] if known and len(known) == len(qos) else None
    return None


def _finding_of_qos(qos: Qos, all_qos: Sequence[Qos], config: ClusterConfig) -> Finding:
    above = [f"QOS {one.name}" for one in all_qos if qos.name in one.preempts]
    if "WITHIN" in f"{qos.preempt_mode},{config.preempt_mode}".upper().split(","):
        above.append(f"QOS {qos.name} of a higher priority")
    return _finding(_mode(qos.preempt_mode, config.preempt_mode), qos.grace_time_s, f"QOS {qos.name}", above, config)


def _finding(mode: str, grace_s: int, of: str, above: Sequence[str], config: ClusterConfig) -> Finding:
    """Return what a rule means for a run: `mode` is OFF, REQUEUE, CANCEL or SUSPEND, or a word of a later Slurm; jobs of `above` may preempt it."""
    if mode == "OFF":
        return Finding("ok", f"PreemptMode is OFF in {of}: a run there is not preempted")
    if not above:
        found = f"PreemptMode is {mode} in {of}, but no partition or QOS has a higher rank, so no job would preempt a run there"
        return Finding("ok", found)
    by = f"PreemptMode is {mode}, GraceTime {grace_s} s, by {of}; jobs of {', '.join(above)} may preempt a run there"
    if mode == "SUSPEND":
        found = f"{by}: Slurm suspends the run without a warning signal until those jobs end"
        to_do = "the run's GPU memory stays in use meanwhile; to avoid this, choose another partition or QOS"
        return Finding("warn", found, to_do)
    kill_wait = "KillWait" if config.kill_wait_s is None else f"{config.kill_wait_s} s (KillWait)"
    asked = f"the run's own signal, SIG{STOP_SIGNAL}," if config.sends_user_signal else "SIGTERM"
    if grace_s:
        found = f"{by}: {asked} comes at once, SIGKILL after {grace_s} s and {kill_wait} more"
    else:
        found = f"{by}: SIGTERM comes at once, SIGKILL {kill_wait} later"
    if mode == "CANCEL":
        to_do = "Slurm does not start a cancelled job again: if the run has not requeued itself in that time, submit it again"
        return Finding("warn", found, to_do)
    if not grace_s:
        to_do = f"a checkpoint that takes longer than {kill_wait} is lost, with the steps since the previous one: save more often (`checkpoint.every_steps`, or in your script)"
        return Finding("warn", found, to_do)
    return Finding("ok", found)
