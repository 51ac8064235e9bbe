"""The sbatch options of a run, in the order in which people read a job script."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec.launch import LaunchSpec

STOP_SIGNAL = "USR2"
"""The signal that Slurm sends before the time limit, and at preemption if the site sends the user's signal. NCCL uses
USR1."""

_SAME_NAME_KEYS = ("partition", "account", "qos", "constraint", "nodelist", "exclude", "dependency")
"""Keys of the section `slurm` that are sbatch options of the same name."""
_MEMORY_FLAGS = ("mem", "mem-per-cpu", "mem-per-gpu")
_GPU_FLAG, _GRES_FLAG = re.compile(r"gpus(-per-(node|socket|task))?"), re.compile(r"gres|tres-per-\w+")
_GPUS_IN_GRES = re.compile(r"\bgpu\b")


def directives(spec: LaunchSpec, run: RunDir, *, chdir: Path, cpus_per_worker: int) -> dict[str, str | None]:
    """Return the options that a run's job is submitted with, by their long names; None is the value of a flag without one."""
    _refuse_two_memories(spec)
    _refuse_two_gpu_options(spec)
    made: dict[str, str | None] = {}
    for flag, value in _options(spec, run, chdir, cpus_per_worker):
        if flag in made:
            raise ConfigError(
                f"`slurm.extra.{flag.replace('-', '_')}` sets `--{flag}`, but another key sets that option already"
                f"{'' if made[flag] is None else f', to `{made[flag]}`'}. Remove one of them; `ddp-hpc config slurm` and `ddp-hpc config resources` list the keys."
            )
        made[flag] = None if value is True else str(value)
    return made


def _options(spec: LaunchSpec, run: RunDir, chdir: Path, cpus_per_worker: int) -> Iterator[tuple[str, object]]:
    resources, slurm = spec.resources, spec.slurm
    yield "job-name", spec.name
    yield "nodes", resources.nodes
    yield "ntasks-per-node", resources.local_world_size
    yield "cpus-per-task", cpus_per_worker
    # GPUs by the node: with `--gpus-per-task`, a rank would see its own GPU alone, and NCCL could not use direct transfers
    # between the GPUs of a node: https://slurm.schedmd.com/gres.html#Running_Jobs
    if resources.gpus_per_node and slurm.gpu_option != "none":
        kind = "gpu" if slurm.gpu_option == "gres" else None
        yield slurm.gpu_option, ":".join(filter(None, [kind, resources.gpu_type, str(resources.gpus_per_node)]))
    if resources.mem_gb is not None or (spec.mem_gb is not None and not _memory_flags(spec)):
        yield "mem", f"{spec.mem_gb}G"
    if resources.time_limit_min is not None:
        yield "time", resources.time_limit_min
    for key in _SAME_NAME_KEYS:
        if getattr(slurm, key) is not None:
            yield key, getattr(slurm, key)
    if slurm.dependency and "kill_on_invalid_dep" not in slurm.extra:
        yield "kill-on-invalid-dep", "yes"  # else a job whose dependency has failed stays in the queue for ever
    yield "chdir", chdir
    # Slurm replaces patterns such as `%j` in this path ("filename pattern" in https://slurm.schedmd.com/sbatch.html).
    yield "output", str(run.console).replace("%", "%%")
    yield "open-mode", "append"
    yield "signal", f"{'B:' if slurm.signal_to == 'batch' else ''}{STOP_SIGNAL}@{slurm.signal_lead_s}"
    yield ("requeue" if slurm.requeue else "no-requeue"), True
    yield from _extra(spec)


def _extra(spec: LaunchSpec) -> list[tuple[str, object]]:
    """Return the flags of `slurm.extra`, as sbatch writes them, and their values."""
    extra = spec.slurm.extra.items()
    return [(key.replace("_", "-"), value) for key, value in extra if value is not False and value is not None]


def sent_options(spec: LaunchSpec) -> set[str]:
    """Return the options for GPUs, and those of `slurm.extra`, that the run's job is submitted with."""
    return {*dict(_extra(spec)), *([spec.slurm.gpu_option] if spec.resources.num_gpus else [])}


def _memory_flags(spec: LaunchSpec) -> list[str]:
    """Return the flags in `slurm.extra` that ask for memory. sbatch takes only one of them, and none beside `--mem`."""
    asked = dict(_extra(spec))
    return [flag for flag in _MEMORY_FLAGS if flag in asked]


def _refuse_two_memories(spec: LaunchSpec) -> None:
    keys = [] if spec.resources.mem_gb is None else ["resources.mem_gb"]
    keys += [f"slurm.extra.{flag.replace('-', '_')}" for flag in _memory_flags(spec)]
    if len(keys) > 1:
        raise ConfigError(
            f"{' and '.join(f'`{key}`' for key in keys)} are set, but sbatch takes one amount of memory: for each node, "
            "for each CPU or for each GPU. Keep one of them."
        )


def _refuse_two_gpu_options(spec: LaunchSpec) -> None:
    """Refuse a flag of `slurm.extra` that asks for GPUs where another option does, and a type that no option says."""
    resources, option = spec.resources, spec.slurm.gpu_option
    if option == "none" and resources.gpu_type:
        raise ConfigError(
            f"`resources.gpu_type` is {resources.gpu_type!r}, but `slurm.gpu_option` is 'none', so the job asks Slurm for no GPU. Set "
            "`resources.gpu_type=null`, and choose the nodes with `slurm.partition` or `slurm.constraint`."
        )
    for flag, value in _extra(spec) if resources.num_gpus and option != "none" else ():
        if _GPU_FLAG.fullmatch(flag) or (_GRES_FLAG.fullmatch(flag) and _GPUS_IN_GRES.search(str(value))):
            raise ConfigError(
                f"`slurm.extra.{flag.replace('-', '_')}` asks for GPUs, but `resources.gpus_per_node` asks too, by `--{option}`. Remove the "
                "first; or set `slurm.gpu_option=none` to keep only the first."
            )


def quote(value: object) -> str:
    """Quote a value for the shell."""
    text = os.fspath(value) if isinstance(value, Path) else str(value)
    if "\0" in text or text.splitlines() not in ([], [text]):
        raise ConfigError(
            f"The configuration has the value {text!r}, which goes into one line of the job script, but it has a line break. Remove the line break."
        )
    return shlex.quote(text)


def quote_for_sbatch(value: object) -> str:
    """Quote a value for a `#SBATCH` line."""
    # sbatch reads the line as a shell would, with one difference: a backslash escapes the next character within single
    # quotes, too (measured: 22.05, 24.11).
    return quote(value).replace("\\", "\\\\")
