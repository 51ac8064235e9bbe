"""Fills in what a user leaves open, before a run is submitted: GPUs here, CPUs of a GPU worker on Slurm, a checkpoint's precision.

What is found stands in the run's own configuration, with its source. A run that is submitted again keeps it, so that it
goes on with the same world.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_hpc.base.discretion import value_or_hidden
from ddp_hpc.base.errors import ConfigError, DdpHpcError
from ddp_hpc.base.names import plural
from ddp_hpc.run.config.keys import is_below
from ddp_hpc.run.config.overlay import Overlay
from ddp_hpc.run.config.resolve import Resolved, flat_spec, keys_of_source, load_resolved
from ddp_hpc.run.config.sources import COMMAND_LINE, DEFAULT
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import RunSpec

if TYPE_CHECKING:
    from ddp_hpc.cluster.machine.gpus import Gpu
    from ddp_hpc.cluster.slurm.queries import NodeShape

VISIBLE_GPUS_NAME = "CUDA_VISIBLE_DEVICES"
BUSY_GIB = 1.0
"""A GPU of which more memory than this is in use has other work."""
_FIRST_SOURCE = "the run's first submission"
_EARLIER_COMMAND_SOURCE = f"{COMMAND_LINE.source}, earlier"
_PER_SUBMISSION_KEYS = frozenset({"name", "runs_dir", "script.command", "slurm.dependency"})
_GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # the second in WSL
_NVML = "libnvidia-ml.so.1"
"""Where neither is, nothing is loaded that a run on CPUs does not need."""


@dataclass(frozen=True, kw_only=True)
class FilledIn:
    """What the machine decides."""

    resources: Mapping[str, int | None] = field(default_factory=dict)
    """Values of `resources`, by their names there."""
    env: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    note: str = ""
    """What the user should know about it."""


def fill_unset(
    resolved: Resolved, environ: Mapping[str, str], *, is_for_slurm: bool, is_fresh: bool = False
) -> Resolved:
    """Return the configuration with what the machine decides, and print a note on it; `is_fresh`: a run that exists does not count."""
    config, before = RunDir(resolved.spec.path).config, None
    with suppress(DdpHpcError, OSError):  # what cannot be read counts as a new run
        before = load_resolved(config) if config.exists() and not is_fresh else None
    resolved = _with_earlier_settings(_with_trained_precision(resolved, before, environ), before, environ)
    spec = resolved.spec
    if is_for_slurm:
        resolved = _with_shorter_lead(resolved, environ)
        spec = resolved.spec
        found = _cpus_on_slurm(spec, before, environ)
    else:
        environ_of_run = {**environ, **spec.environ}
        there, why_not = _visible_gpus_and_note(spec, before, environ_of_run)
        found = choose_gpus(spec, before, there, environ_of_run.get(VISIBLE_GPUS_NAME))
        if why_not and found.resources.get("gpus_per_node") == 0:
            found = replace(found, source="unknown", note=why_not)
    if found.note:
        sys.stderr.write(f"note: {found.note}\n")
    if not found.resources:
        return resolved
    settings: dict[str, Any] = {"resources": dict(found.resources), **({"env": dict(found.env)} if found.env else {})}
    return Overlay(resolved, environ).resolve(settings, found.source)


def _with_earlier_settings(resolved: Resolved, before: RunSpec | None, environ: Mapping[str, str]) -> Resolved:
    """Return the configuration with what command lines have set for the run, where this one does not set that key."""
    if before is None or "Python" in resolved.sources.values():
        return resolved
    was, now = flat_spec(before), flat_spec(resolved.spec)
    set_now = [key for key, source in resolved.sources.items() if source == COMMAND_LINE.source]
    kept = {
        key: was[key]
        for key in keys_of_source(RunDir(resolved.spec.path).config, COMMAND_LINE.source)
        if key in was and key not in _PER_SUBMISSION_KEYS
        if not any(is_below(key, one) or is_below(one, key) for one in set_now)
    }
    changed = [key for key in kept if was[key] != now.get(key)]
    told = [f"`{key}={value_or_hidden(key, was[key])}`" for key in changed]
    if told:
        sys.stderr.write(
            f"note: the run keeps what an earlier command line has set: {', '.join(told)}; a value on the command line changes it\n"
        )
    return Overlay(resolved, environ).resolve(kept, _EARLIER_COMMAND_SOURCE, are_filled=True) if kept else resolved


def _with_trained_precision(resolved: Resolved, before: RunSpec | None, environ: Mapping[str, str]) -> Resolved:
    """Return the configuration with the precision of float32 that the run's checkpoint was trained with, where no source sets that key."""
    precision = None if before is None else before.train.matmul_precision
    is_set = resolved.sources["train.matmul_precision"] != DEFAULT.source
    if precision is None or is_set:
        return resolved
    from ddp_hpc.run.run_dir.records import newest_committed_step  # late: a new run does not need it

    if not newest_committed_step(RunDir(resolved.spec.path)):
        return resolved
    sys.stderr.write(
        f"note: `train.matmul_precision` stays {precision!r}, as the run's checkpoint was trained; a value in the file or on the command line changes it\n"
    )
    return Overlay(resolved, environ).resolve({"train": {"matmul_precision": precision}}, _FIRST_SOURCE)


def _with_shorter_lead(resolved: Resolved, environ: Mapping[str, str]) -> Resolved:
    """Return the configuration with a lead that fits the time limit, where no source sets the lead."""
    limit_min, lead_s = resolved.spec.resources.time_limit_min, resolved.spec.slurm.signal_lead_s
    if limit_min is None or limit_min * 60 > lead_s or resolved.sources["slurm.signal_lead_s"] != DEFAULT.source:
        return resolved
    shorter = limit_min * 60 // 4
    sys.stderr.write(
        f"note: Slurm asks the run to stop {shorter} s before its time limit, not {lead_s} s (`slurm.signal_lead_s`), because "
        f"`resources.time_limit_min` is {limit_min}\n"
    )
    return Overlay(resolved, environ).resolve({"slurm": {"signal_lead_s": shorter}}, f"a time limit of {limit_min} min")


def _visible_gpus_and_note(
    spec: RunSpec, before: RunSpec | None, environ: Mapping[str, str]
) -> tuple[list[Gpu] | None, str]:
    """Return the GPUs that the run would see, None where it uses none or the driver does not say; and in the latter case a note."""
    folders = environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    may_have = any(path.exists() for path in (*_GPU_DEVICES, *(Path(folder, _NVML) for folder in folders if folder)))
    asked = spec.resources.gpus_per_node
    if not may_have or asked == 0 or (asked is None and before is not None and not before.resources.gpus_per_node):
        return None, ""
    from ddp_hpc.cluster.machine.gpus import gpus_here  # late: runs on CPUs do not need them
    from ddp_hpc.cluster.rendezvous.worker_env import SHARED_GPU

    if SHARED_GPU in environ:
        return None, ""
    there = gpus_here(environ.get(VISIBLE_GPUS_NAME))
    return there, "" if there is not None else (
        "NVIDIA's driver does not say which GPUs are here (it failed, or did not answer within 10 s), so the run trains on CPUs; "
        "`nvidia-smi` may say why, and `resources.gpus_per_node` asks for GPUs all the same"
    )


def choose_gpus(spec: RunSpec, before: RunSpec | None, there: Sequence[Gpu] | None, visible: str | None) -> FilledIn:
    """Return which GPUs of this machine a run takes; `there` are those it would see, and `visible` is CUDA_VISIBLE_DEVICES."""
    asked, workers = spec.resources.gpus_per_node, spec.resources.workers_per_node
    is_script = spec.script.is_set
    kept = None if before is None else before.resources.gpus_per_node or 0
    if is_script and kept:
        kept = None  # it sees what is here, as by plain `python`
    if asked is not None or kept:
        needed = kept if asked is None else min(asked, spec.resources.local_world_size)
        if there is not None and needed is not None and len(there) < needed:
            raise ConfigError(_too_few_gpus_text(needed, there, visible, is_kept=asked is None))
    if asked is not None:
        return FilledIn()
    if kept == 0 or not there:
        source = "no GPU of NVIDIA's here" if kept is None else _FIRST_SOURCE
        is_hidden = there is not None and visible and kept is None
        note = (
            f"{VISIBLE_GPUS_NAME} is {visible!r}, which names no GPU of this machine, so the run trains on CPUs"
            if is_hidden
            else ""
        )
        return FilledIn(resources={"gpus_per_node": kept or 0}, source=source, note=note)
    is_busy = {gpu.name: (gpu.memory_gib or 0.0) > BUSY_GIB for gpu in there}
    free = [gpu for gpu in there if not is_busy[gpu.name]] or there
    wanted = kept or (max(len(free), workers or 0) if is_script else workers or len(free))
    if wanted > len(there):
        note = (
            f"the workers train on CPUs, because `resources.workers_per_node` is {workers} and this machine shows {plural(len(there), 'GPU')}; "
            f"to use GPUs, set `resources.workers_per_node={len(there)}`"
        )
        note = "" if is_script else note  # which device a script uses is its own affair
        return FilledIn(resources={"gpus_per_node": 0}, source=f"{plural(len(there), 'GPU')} here", note=note)
    taken = sorted(there, key=lambda gpu: gpu not in free)[:wanted]
    left_out = [gpu for gpu in there if gpu not in free and gpu not in taken]
    names = [gpu.name for gpu in taken]
    # CUDA counts the fastest GPU first unless it is told otherwise, and NVML counts them by their place on the bus.
    order = {} if visible else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    notes = [
        f"GPU {gpu.name} is {'left out' if gpu in left_out else 'used, as too few are free'}: {gpu.memory_gib:.1f} GiB of its memory are in use"
        for gpu in there
        if is_busy[gpu.name] and (gpu in left_out or gpu in taken)
    ]
    resources = {"gpus_per_node": len(taken)}
    if is_script and workers is None:
        resources["workers_per_node"] = 1
        if len(taken) > 1:
            notes.append(
                f"the script gets one worker, which sees {len(taken)} GPUs, as with plain `python`; for one worker for each, "
                f"set `resources.workers_per_node={len(taken)}`"
            )
    return FilledIn(
        resources=resources,
        env={VISIBLE_GPUS_NAME: ",".join(names), **order} if left_out else {},
        source=_FIRST_SOURCE if kept else f"{plural(len(taken), 'GPU')} of this machine",
        note="; ".join(notes),
    )


def _too_few_gpus_text(needed: int, there: Sequence[Gpu], visible: str | None, *, is_kept: bool) -> str:
    asks = "was first submitted with" if is_kept else "asks for"
    shown = "not set" if visible is None else repr(visible)
    on_gpus = f"`resources.gpus_per_node={len(there)}`, or " if there else ""
    return (
        f"The run {asks} {plural(needed, 'GPU')} (`resources.gpus_per_node`), but this machine shows {plural(len(there), 'GPU')} ({VISIBLE_GPUS_NAME} is {shown}). "
        f"Set {on_gpus}`resources.gpus_per_node=0` to train on CPUs, or list more GPUs in {VISIBLE_GPUS_NAME} (the run's `env.{VISIBLE_GPUS_NAME}`, if set, is used instead)."
    )


def _cpus_on_slurm(spec: RunSpec, before: RunSpec | None, environ: Mapping[str, str]) -> FilledIn:
    """Return how many CPUs each GPU worker gets, where Slurm says what the nodes have."""
    resources = spec.resources
    if not resources.num_gpus or resources.cpus_per_worker is not None:
        return FilledIn()
    if before is not None:
        kept = before.resources.cpus_per_worker
        return FilledIn() if kept is None else FilledIn(resources={"cpus_per_worker": kept}, source=_FIRST_SOURCE)
    from ddp_hpc.cluster.slurm import client  # late: runs on one machine do not need it
    from ddp_hpc.cluster.slurm.queries import chosen_partition

    with suppress(DdpHpcError):  # Slurm does not answer now: the submission says so
        partitions = client.partitions(environ)
        default = chosen_partition(None, partitions)
        names = (spec.slurm.partition or (default.name if default else "")).split(",")
        limits = {one.name: one.max_cpus_per_node for one in partitions if one.max_cpus_per_node}
        shapes = [one for one in client.node_shapes(environ) if one.partition in names]
        return share_cpus_by_gpus(
            spec, [replace(one, num_cpus=min(one.num_cpus, limits.get(one.partition, one.num_cpus))) for one in shapes]
        )
    return FilledIn()


def share_cpus_by_gpus(spec: RunSpec, shapes: Sequence[NodeShape]) -> FilledIn:
    """Return a worker's share of the CPUs that come with its GPUs: a node's CPUs divided by its GPUs, where that is more than without."""
    resources = spec.resources
    if spec.slurm.gpu_option == "none":  # a whole node, whose GPUs Slurm does not count
        shapes = [replace(shape, num_gpus=resources.num_gpus, gpu_type=None) for shape in shapes]
    fitting = [
        shape
        for shape in shapes
        if shape.num_gpus >= resources.num_gpus and resources.gpu_type in (None, shape.gpu_type)
    ]
    if not fitting:
        return FilledIn()
    least = min(fitting, key=lambda shape: shape.num_cpus / shape.num_gpus)
    of_gpus = least.num_cpus * resources.num_gpus // least.num_gpus
    each = of_gpus // resources.local_world_size
    if each <= spec.cpus_per_task:
        return FilledIn()
    why = f"nodes of partition {least.partition} have {least.num_cpus} CPUs for {plural(least.num_gpus, 'GPU')}"
    note = f"each worker gets {each} CPUs, because {why}; `resources.cpus_per_worker` sets another number"
    return FilledIn(resources={"cpus_per_worker": each}, source=why, note=note)
