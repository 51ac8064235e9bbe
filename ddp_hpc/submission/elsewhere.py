"""Scripts for schedulers that ddp-hpc does not submit to itself: a job script for PBS, a TrainJob for Kubeflow Trainer.

Both start `ddp-hpc join` on each node, which finds its place by the variables there (`rendezvous.launchers`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_hpc import __version__, exit_codes
from ddp_hpc.base.discretion import is_key_shown
from ddp_hpc.base.durable import replace_text
from ddp_hpc.config import Resolved, flat, render_resolved
from ddp_hpc.config.yaml_text import dump_value
from ddp_hpc.errors import ConfigError
from ddp_hpc.render import render_template
from ddp_hpc.run_dir.paths import RunDir
from ddp_hpc.spec import RunSpec
from ddp_hpc.submission.run_dir_setup import make_run_dir, refuse_file_in_the_way

PBS_TEMPLATE = "ddp.pbs.j2"
RUNTIME = "torch-distributed"
"""The runtime for PyTorch that Kubeflow Trainer installs by default."""
_PLAIN = re.compile(r"[A-Za-z0-9_./@%+=:,-]+")
"""Text that a `#PBS` line takes as it is; PBS has no quoting there that all versions share."""
_MOST_NAME = 15
"""Characters of a job's name in every version of PBS."""
_LONGEST_LABEL = 63
"""Characters of a name in Kubernetes (RFC 1123)."""


# --- PBS ---------------------------------------------------------------------------------------------------------------


def prepare_pbs(resolved: Resolved, code_dir: Path | None) -> RunDir:
    """Make the run's directory with a job script for PBS Professional; return it.

    `code_dir` is where the user's code lies besides the working directory.

    Raises:
        ConfigError: where the configuration asks for what the script cannot do, or the directory cannot be made.
    """
    run = RunDir(resolved.spec.path)
    refuse_file_in_the_way(run)
    script = pbs_script(resolved.spec, run, Path.cwd(), code_dir)
    make_run_dir(run, render_resolved(resolved), is_new=not run.config.exists())
    replace_text(run.pbs_script, script)
    return run


def pbs_script(spec: RunSpec, run: RunDir, chdir: Path, code_dir: Path | None = None) -> str:
    """Return the text of the job script.

    Raises:
        ConfigError: where the configuration asks for what the script cannot do.
    """
    resources, lead_s = spec.resources, spec.slurm.signal_lead_s
    _refuse(
        "pbs",
        {
            "container.image": spec.container.image is not None,
            "stage.dir": spec.stage.dir is not None,
            "resources.gpu_type": resources.gpu_type is not None,
            "launcher": spec.launcher != "agent",
            "slurm.template": spec.slurm.template is not None,
        },
    )
    limit_s = None if resources.time_limit_min is None else resources.time_limit_min * 60
    if limit_s is not None and limit_s <= lead_s:
        raise ConfigError(
            f"`resources.time_limit_min` is {resources.time_limit_min}, but the run is asked to stop {lead_s} s before the limit "
            "(`slurm.signal_lead_s`), which leaves no time to train. Ask for more time, or lower `slurm.signal_lead_s`."
        )
    for what, text in (("The path of the run", str(run.console)), ("The name of the run", spec.name)):
        if _PLAIN.fullmatch(text) is None:
            raise ConfigError(
                f"{what} is {text!r}, but a `#PBS` line cannot hold blanks and special characters. Choose another one."
            )
    values = {
        "job_name": spec.name[:_MOST_NAME],
        "name": spec.name,
        "version": __version__,
        "select": _select(spec),
        "nodes": resources.nodes,
        "walltime": None if limit_s is None else f"{limit_s // 3600:02}:{limit_s // 60 % 60:02}:00",
        "stop_after_s": None if limit_s is None else limit_s - lead_s,
        "console": run.console,
        "chdir": chdir,
        "code_dir": None if code_dir == chdir else code_dir,
        "modules": spec.slurm.modules,
        "setup": spec.slurm.setup,
        "config": run.config,
        "python": sys.executable,
        "script": run.pbs_script,
        "stop_request": run.stop_request,
        "done": run.done,
        "stopped": exit_codes.STOPPED,
    }
    return render_template(PBS_TEMPLATE, values)


def _select(spec: RunSpec) -> str:
    """Return what each chunk, which is a node here, asks for."""
    resources = spec.resources
    parts = [f"{resources.nodes}", f"ncpus={_cpus(spec)}", "mpiprocs=1"]
    parts += [f"ngpus={resources.gpus_per_node}"] if resources.gpus_per_node else []
    parts += [f"mem={spec.mem_gb}gb"] if spec.mem_gb else []
    return ":".join(parts)


def _cpus(spec: RunSpec) -> int:
    return spec.cpus_per_task * spec.resources.local_world_size


# --- Kubeflow Trainer --------------------------------------------------------------------------------------------------


def train_job(resolved: Resolved, *, claim: str | None) -> str:
    """Return a TrainJob of Kubeflow Trainer v2 as YAML; `claim` is the PersistentVolumeClaim mounted at `runs_dir`.

    Raises:
        ConfigError: where the configuration does not say enough, or asks for what a TrainJob cannot do.
    """
    import yaml  # late: `ddp_hpc.config` reads YAML by its own rules

    spec = resolved.spec
    _refuse(
        "trainjob",
        {
            "stage.dir": spec.stage.dir is not None,
            "container.binds": bool(spec.container.binds),
            "container.options": bool(spec.container.options),
            "slurm.modules": bool(spec.slurm.modules),
            "slurm.setup": bool(spec.slurm.setup),
            "resources.gpu_type": spec.resources.gpu_type is not None,
            "launcher": spec.launcher != "agent",
        },
    )
    if spec.container.image is None or "/" in spec.container.image[:1]:
        raise ConfigError(
            f"`container.image` is {spec.container.image!r}, but a TrainJob needs the name of an image in a registry, with ddp_hpc and "
            "your code in it. Set it: `container.image=registry.example.com/me/train:1`."
        )
    if claim is None or not Path(spec.runs_dir).is_absolute():
        raise ConfigError(
            f"`runs_dir` is {spec.runs_dir!r}, and the volume is {claim!r}, but checkpoints must outlive the pods, and all of them must "
            "see the same. Name a PersistentVolumeClaim that pods can share with `--claim NAME`, and an absolute directory to mount "
            "it at with `runs_dir=/runs`."
        )
    trainer: dict[str, Any] = {
        "image": spec.container.image,
        "command": [spec.container.python, "-m", "ddp_hpc", "join"],
        "args": [*_arguments(resolved), *(["--", *spec.script.command] if spec.script.is_set else [])],
        "numNodes": spec.resources.nodes,
        "numProcPerNode": spec.resources.local_world_size,
        "resourcesPerNode": _resources_per_node(spec),
    }
    label = _label(spec.name)
    if spec.environ:
        trainer["env"] = [_variable(name, value, f"{label}-env") for name, value in spec.environ.items()]
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": label},
        "spec": {"runtimeRef": {"name": RUNTIME}, "trainer": trainer, "runtimePatches": [_patch(spec, claim)]},
    }
    text: str = yaml.safe_dump(job, sort_keys=False, width=1000)
    head = f"# TrainJob of the run {spec.name}, written by ddp-hpc {__version__}. `kubectl create -f` with this file starts it.\n"
    hidden = [name for name in spec.environ if not is_key_shown(f"env.{name}", spec.environ[name])]
    if hidden:
        values = " ".join(f"--from-literal={name}=..." for name in hidden)
        head += (
            f"# Values that may be secrets come from a Secret: `kubectl create secret generic {label}-env {values}`\n"
        )
    return head + text


_GIVEN_BY_JOB = ("container.", "launcher", "resources.", "script.command", "slurm.", "snapshot.", "stage.", "env.")
"""Beginnings of keys that the TrainJob says in its own way, or that mean nothing in a pod."""
_READ_BY_WORKERS = frozenset({"resources.cpus_per_worker", "resources.gpus_per_node"})


def _arguments(resolved: Resolved) -> Iterator[str]:
    """Yield the settings of the run that are no defaults; the pods have no configuration file."""
    for key, value in flat(resolved.spec).items():
        is_kept = key in {"name", "runs_dir"} or resolved.sources.get(key) != "default"
        if is_kept and (key in _READ_BY_WORKERS or not key.startswith(_GIVEN_BY_JOB)):
            _require_shown(key, value)
            yield f"{key}={dump_value(value)}"


def _variable(name: str, value: str, secret: str) -> Mapping[str, Any]:
    """Return a variable of the container; one that may be a secret comes from a Secret, as everybody who may see jobs sees these."""
    if is_key_shown(f"env.{name}", value):
        return {"name": name, "value": value}
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": name}}}


def _require_shown(key: str, value: object) -> None:
    if not is_key_shown(key, value):
        raise ConfigError(
            f"`{key}` may be a secret, and everybody who may read TrainJobs would see it. Unset it, and have your recipe read it from a "
            "variable of the key `env`."
        )


def _resources_per_node(spec: RunSpec) -> Mapping[str, Mapping[str, str]]:
    amounts = {"cpu": str(_cpus(spec))}
    if spec.mem_gb:
        amounts["memory"] = f"{spec.mem_gb}Gi"
    if spec.resources.gpus_per_node:
        amounts["nvidia.com/gpu"] = str(spec.resources.gpus_per_node)
    return {"requests": dict(amounts), "limits": dict(amounts)}


def _patch(spec: RunSpec, claim: str) -> Mapping[str, Any]:
    """Return what the job changes in the runtime: the volume of the runs, and the time for a last checkpoint."""
    volume = {"name": "runs", "persistentVolumeClaim": {"claimName": claim}}
    mount = {"name": "node", "volumeMounts": [{"name": "runs", "mountPath": spec.runs_dir}]}
    pod = {"terminationGracePeriodSeconds": spec.slurm.signal_lead_s, "volumes": [volume], "containers": [mount]}
    replicated = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    return {
        "manager": "ddp-hpc.io/render",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}},
    }


def _label(name: str) -> str:
    """Return a name as Kubernetes takes it."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:_LONGEST_LABEL].strip("-") or "run"


def _refuse(target: str, is_set: Mapping[str, bool]) -> None:
    keys: Sequence[str] = [f"`{key}`" for key, value in is_set.items() if value]
    if keys:
        raise ConfigError(
            f"`--target {target}` cannot do what {' and '.join(keys)} {'asks' if len(keys) == 1 else 'ask'} for. Unset "
            f"{'it' if len(keys) == 1 else 'them'}, and change the written file by hand where you need it."
        )
