"""Where a check works: a directory with a configuration, the runs made from it, and what is read of them."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from ddp_hpc.base import processes
from ddp_hpc.base.durable import read_json_lines
from ddp_hpc.cluster.rendezvous.worker_env import SHARED_GPU
from ddp_hpc.run.checkpoints import checkpoint_names
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir

ROOT = Path(__file__).resolve().parent.parent.parent
PATIENCE_S = 150.0
"""How long a command, or a condition, may take."""
DIGITS, FAULTY = "digits.yaml", "faulty.yaml"
CONFIGS = {
    DIGITS: """\
recipe: {target: image_classification, args: {dataset: digits}}
log: {every_steps: 5}
train: {epochs: 4, global_batch_size: 96, lr: 0.1}
""",
    FAULTY: """\
recipe: {target: "benchmarks.gpu.recipes:build"}
log: {every_steps: 5}
train: {epochs: 4, global_batch_size: 32, lr: 0.1}
""",
}
Figures = dict[str, Any]
Value = TypeVar("Value")


class SkippedError(Exception):
    """This machine cannot run the check; the message says why."""


def require(package: str) -> None:
    """Skip the check where `package` is not installed."""
    if importlib.util.find_spec(package) is None:
        raise SkippedError(f"needs the package {package}")


def require_flight_record() -> None:
    """Skip the check where gloo keeps no record of its collectives, by which a rank that hangs or is slow is named."""
    from torch._C._distributed_c10d import _get_handler_names  # type: ignore[attr-defined]  # the stubs leave it out

    if "fr_trace_json" not in _get_handler_names():
        raise SkippedError("needs PyTorch that records gloo's collectives")


def awaited(condition: Callable[[], Value], what: str) -> Value:
    """Return the condition's first true value."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {PATIENCE_S:.0f} s in vain: {what}")
        time.sleep(0.005)
    return value


@dataclass(frozen=True)
class Said:
    """What a command printed, how it ended, and how long it took."""

    rc: int
    text: str
    seconds: float


@dataclass(frozen=True)
class Place:
    """A directory of one check's own; `path.parent` belongs to all checks."""

    path: Path
    device: str
    tiny: bool

    @property
    def digits(self) -> list[str]:
        """Return the configuration of an ordinary training: images and a ResNet, or a few layers where it must be small."""
        if self.tiny:
            return [FAULTY, "recipe.args.how=paced", "train.global_batch_size=16"]
        return [DIGITS, "recipe.args.model=resnet18", "recipe.args.image_size=32", "recipe.args.augment=true"]

    @property
    def has_cuda(self) -> bool:
        return self.device == "cuda"

    def run(self, *argv: str, env: Mapping[str, str] | None = None) -> Said:
        """Run a command here, without network."""
        paths = [str(ROOT), str(self.path), *filter(None, [os.environ.get("PYTHONPATH")])]
        local = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
        began = time.monotonic()
        done = subprocess.run(
            argv,
            cwd=self.path,
            env={**os.environ, **local, "PYTHONPATH": os.pathsep.join(paths), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            timeout=PATIENCE_S,
        )
        print(f"$ {' '.join(argv)}\n{done.stdout}[{done.returncode}]", flush=True)  # into the check's log
        return Said(done.returncode, done.stdout, time.monotonic() - began)

    def ddp_hpc(self, *words: str, env: Mapping[str, str] | None = None) -> Said:
        return self.run(sys.executable, "-m", "ddp_hpc", *words, env=env)

    def submit(self, name: str, config: str, *words: str, workers: int = 1, wait: bool = True) -> tuple[RunDir, Said]:
        """Submit `config`; with `wait`, return once the run has ended."""
        if config in CONFIGS:  # else it lies there already
            (self.path / config).write_text(CONFIGS[config])
        gpus = f"resources.gpus_per_node={workers if self.has_cuda else 0}"
        asked = [gpus, f"resources.workers_per_node={workers}", f"name={name}"]
        # Several workers share the one GPU, by the switch that is there for this.
        env = {SHARED_GPU: "1"} if self.has_cuda and workers > 1 else None
        said = self.ddp_hpc("submit", config, *asked, *words, *(["--wait"] if wait else []), env=env)
        run = RunDir(self.path / "runs" / name)
        if run.path.exists() and (wait or said.rc):
            print(self.console(run), flush=True)
        return run, said

    def finished(self, name: str, config: str, *words: str, workers: int = 1) -> RunDir:
        """Submit, and require that the run finishes."""
        run, said = self.submit(name, config, *words, workers=workers)
        if said.rc != 0:
            raise RuntimeError(f"the run {name} ended with {said.rc}: {said.text.strip()[-600:]}")
        return run

    def console(self, run: RunDir) -> str:
        path = run.path / "logs" / "console.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def digest(self, run: RunDir) -> str:
        return self.ddp_hpc("checkpoints", run.name, "--digest").text.strip().splitlines()[-1]

    def report(self) -> Path:
        """Return where a recipe writes what it saw."""
        return self.path / "report.json"

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Have the machine for one round: other checks that measure rates wait meanwhile."""
        with (self.path.parent / "turn.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def losses(run: RunDir) -> list[float]:
    """Return the losses that the run recorded while training."""
    return [record["loss"] for record in read_json_lines(run.metrics) if record["kind"] == "train"]


def numbers(run: RunDir) -> list[dict[str, Any]]:
    """Return all that the run recorded but times and rates."""
    return [
        {key: record[key] for key in record.keys() - {"at", "samples_per_s"}} for record in read_json_lines(run.metrics)
    ]


def newest_step(run: RunDir) -> int:
    """Return the step of the newest checkpoint, 0 without one."""
    return ([0, *checkpoint_names.committed_steps(run)])[-1]


def processes_of(run: RunDir) -> tuple[psutil.Process, list[psutil.Process]]:
    """Return the process that a running run's ledger names, and its workers."""
    top = psutil.Process(Ledger.read(run).attempts[-1].pid)
    (agent,) = (one for one in top.children() if _has(one, "ddp_hpc.job.node.agent"))
    # A forked worker has the agent's command line and its environment, as the kernel shows them.
    return top, [one for one in agent.children() if _has(one, "ddp_hpc.job.node.")]


def _has(process: psutil.Process, text: str) -> bool:
    try:
        return any(text in word for word in process.cmdline())
    except psutil.Error:
        return False


def await_end(run: RunDir) -> float:
    """Wait until no process of the run is left; return how long that took."""
    began = time.monotonic()
    awaited(lambda: not processes.is_locked(run.lock), f"the end of {run.name}")
    return time.monotonic() - began


def gpu_memory_mib() -> float:
    """Return how much memory of the first GPU is in use, by NVML."""
    import pynvml

    pynvml.nvmlInit()
    return float(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used) / 2**20
