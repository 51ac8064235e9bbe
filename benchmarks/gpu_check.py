"""Check and measure on one GPU what cannot be told without one: one go, under ten minutes.

    python benchmarks/gpu_check.py                      # on a machine with a GPU; writes into benchmarks/results/
    python benchmarks/gpu_check.py --device cpu --tiny  # about a minute: proves this script, its figures mean nothing

Forked workers with CUDA and NCCL, how busy the GPU is by NVML, bf16 and fp16, exact resume and the cost of deterministic algorithms, the pinned copy
of a checkpoint, and samples/s beside a naive and a hand-tuned loop. It needs our runtime dependencies, no installation.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal, cast

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a plain checkout will do

from benchmarks import gpu_loops
from benchmarks.rounds import surroundings
from ddp_hpc.base import processes
from ddp_hpc.base.durable import read_json_lines
from ddp_hpc.checkpoints import checkpoint_names, checkpoint_store
from ddp_hpc.machine.gpus import GpuReader, visible_gpus
from ddp_hpc.run_dir.ledger import Ledger
from ddp_hpc.run_dir.paths import RunDir
from ddp_hpc.train.recipe import Recipe
from ddp_hpc.train.recipes import image_classification

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
LIMIT_S = 500.0
"""No check begins later, so that the whole stays under ten minutes."""
PATIENCE_S = 120.0
"""How long a command, or the death of a process, may take."""
NEEDS_CUDA = "not run: needs CUDA"
LO = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""All that is here stays on this machine."""


# --- whole runs, through the command line ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Workplace:
    """A directory with a configuration, and the runs made from it."""

    path: Path
    device: str
    tiny: bool

    def ddp_hpc(self, verb: str, *words: str) -> str:
        """Run `ddp-hpc VERB WORDS` here; return what it printed."""
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        done = subprocess.run(
            [sys.executable, "-m", "ddp_hpc", verb, *words],
            cwd=self.path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
        if done.returncode != 0:
            consoles = sorted(self.path.glob("runs/*/logs/console.log"), key=lambda path: path.stat().st_mtime)
            said = [*(path.read_text()[-3000:] for path in consoles[-1:]), done.stdout, done.stderr]
            raise RuntimeError(f"`ddp-hpc {verb} {' '.join(words)}` ended with {done.returncode}:\n" + "\n".join(said))
        return done.stdout

    def submit(self, name: str, *words: str) -> RunDir:
        """Submit the digits, small, or what `words` say; return once it trains, or with `--wait` once it has ended."""
        config = self.path / "check.yaml"
        config.write_text("log: {every_steps: 5}\ntrain: {epochs: 4}\n")
        gpus = f"resources.gpus_per_node={int(self.device == 'cuda')}"
        self.ddp_hpc("submit", str(config), f"name={name}", gpus, *words)
        return RunDir(self.path / "runs" / name)

    def digest(self, run: RunDir) -> str:
        return self.ddp_hpc("checkpoints", run.name, "--digest").strip()


def build_in_worker(device: str, report: str) -> Recipe:
    """Return the digits recipe, once this forked worker has all-reduced on its device and written down what it saw."""
    values = torch.full((1 << 20,), 2.0, device=device)
    dist.all_reduce(values)
    found = {
        "backend": dist.get_backend_config(),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "parent": psutil.Process(os.getppid()).cmdline(),
        "all_reduced": values.unique().tolist(),
    }
    Path(report).write_text(json.dumps(found))
    return image_classification.build(dataset="digits")


def check_forked_worker(place: Workplace) -> dict[str, Any]:
    """Submit a run whose worker, forked by the agent, uses the device and the group."""
    report = place.path / "worker.json"
    args = [f"recipe.args.device={place.device}", f"recipe.args.report={report}"]
    began = time.monotonic()
    place.submit("forked", "--wait", "recipe.target=benchmarks.gpu_check:build_in_worker", *args)
    seconds = time.monotonic() - began
    found: dict[str, Any] = json.loads(report.read_text())
    assert "ddp_hpc.job.node.agent" in found.pop("parent"), "the worker was not forked by the agent"
    assert found.pop("all_reduced") == [2.0], "the all-reduce in the worker changed the values"
    assert ("nccl" in found["backend"]) == (place.device == "cuda"), f"the backend is {found['backend']!r}"
    return {**found, "submit_to_end_s": seconds}


def check_precision(place: Workplace, precision: str) -> dict[str, Any]:
    """Train in bf16 or fp16: the loss must fall, and the checkpoint hold fp16's loss scale."""
    run = place.submit(precision, "--wait", f"train.precision={precision}")
    records = list(read_json_lines(run.metrics))
    losses = [record["loss"] for record in records if record["kind"] == "train"]
    assert losses[-1] < 0.5 * losses[0], f"the loss went from {losses[0]} to {losses[-1]}, which is no training"
    newest = checkpoint_names.committed_steps(run)[-1]
    scaler = checkpoint_store.read_manifest(checkpoint_names.checkpoint_path(run, newest)).state["scaler"]
    assert (scaler is not None) == (precision == "fp16"), f"the checkpoint's scaler is {scaler!r}"
    assert scaler is None or scaler["scale"] > 0, f"the loss scale is {scaler!r}"
    accuracy = [record["accuracy"] for record in records if record["kind"] == "eval"][-1]
    return {"first_loss": losses[0], "last_loss": losses[-1], "accuracy": accuracy, "scaler": scaler}


def check_resume(place: Workplace, precision: str) -> dict[str, Any]:
    """Compare a whole run with one whose worker, and then whose agent, is killed with kill -9."""
    every, steps = (5, 60) if place.tiny else (25, 800)
    model, pixels = ("mini_resnet", 16) if place.tiny else ("resnet18", 32)
    words = [f"train.precision={precision}", "train.deterministic=true", "train.epochs=1000"]
    words += [f"train.max_steps={steps}", f"checkpoint.every_steps={every}", "eval.every_epochs=10"]
    words += [f"recipe.args.model={model}", f"recipe.args.image_size={pixels}", "recipe.args.augment=true"]
    words += ["train.channels_last=true", "train.ema_decay=0.9", "train.grad_clip_norm=1.0", "optimizer.name=adamw"]
    words += ["train.lr=0.001", f"train.global_batch_size={32 if place.tiny else 96}"]
    whole = place.submit(f"whole-{precision}", "--wait", *words)
    name, resumed_at = f"killed-{precision}", list[int]()
    for kind in ("worker", "agent"):
        run = place.submit(name, *words)
        _kill_after_next_commit(run, kind)
        resumed_at.append(checkpoint_names.committed_steps(run)[-1])
        assert resumed_at[-1] < steps, "the run was over before the kill: nothing was tried"
    run = place.submit(name, "--wait", *words)
    digests = [place.digest(whole), place.digest(run)]
    found = {"steps": steps, "model": model, "resumed_at": resumed_at, "digests": digests}
    assert digests[0] == digests[1], f"the digests differ: {found}"
    assert _numbers_of(whole) == _numbers_of(run), "the digests are equal, but the metrics are not"
    return found


def _kill_after_next_commit(run: RunDir, kind: str) -> None:
    """Kill a process of the run once it has committed a checkpoint of its own; return when all its kin are gone."""
    before = checkpoint_names.committed_steps(run)[-1:]
    deadline = time.monotonic() + PATIENCE_S
    while checkpoint_names.committed_steps(run)[-1:] == before:
        assert time.monotonic() < deadline, f"{run.name} committed nothing in {PATIENCE_S} s"
        time.sleep(0.002)
    (agent,) = psutil.Process(Ledger.read(run).attempts[-1].pid).children()
    (agent if kind == "agent" else agent.children()[0]).kill()
    while processes.is_locked(run.lock):
        assert time.monotonic() < deadline, f"{run.name} lives on after its {kind} was killed"
        time.sleep(0.01)
    assert not run.done.exists(), "the run was over before the kill: nothing was tried"


def _numbers_of(run: RunDir) -> list[dict[str, Any]]:
    records = read_json_lines(run.metrics)
    return [{key: record[key] for key in record.keys() - {"at", gpu_loops.RATE}} for record in records]


# --- in this process -------------------------------------------------------------------------------------------------


def check_group(device: torch.device) -> dict[str, Any]:
    """All-reduce, and have DDP do it in a backward: a group of one must change nothing."""

    def check() -> dict[str, Any]:
        values = torch.arange(1 << 24, dtype=torch.float32, device=device)
        before = values.clone()
        seconds = [gpu_loops.seconds_of(device, lambda: dist.all_reduce(values)) for _ in range(10)]
        assert torch.equal(values, before), "an all-reduce over one rank changed the values"
        bare = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
        ids = [device.index] if device.type == "cuda" else None
        wrapped = DistributedDataParallel(copy.deepcopy(bare), device_ids=ids, gradient_as_bucket_view=True)
        inputs = torch.randn(32, 64, device=device)
        for network in (bare, wrapped):
            network(inputs).square().mean().backward()
        pairs = zip(bare.parameters(), wrapped.parameters(), strict=True)
        same = all(torch.equal(cast("Tensor", one.grad), cast("Tensor", other.grad)) for one, other in pairs)
        assert same, "DDP's gradients over one rank differ from the bare network's"
        return {"backend": dist.get_backend_config(), "all_reduce_64_mib_ms": median(seconds) * 1e3}

    with gpu_loops.alone(device):
        return check()


def check_machine_use(device: torch.device) -> dict[str, Any]:
    """Keep the GPU busy, and hold what is sampled of it against CUDA's own figures of the memory."""
    reader = GpuReader(visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), 1))
    [idle], problem = reader.read()
    assert not problem, problem
    left = torch.randn(4096, 4096, device=device)
    seen, busy, end = idle, [], time.monotonic() + 4.0
    began = time.thread_time()
    num_reads = 0
    while time.monotonic() < end:
        for _ in range(20):
            left = (left @ left).clamp(-1, 1)
        torch.cuda.synchronize(device)
        [seen], problem = reader.read()
        num_reads += 1
        busy.append(seen.busy)
    free, total = torch.cuda.mem_get_info(device)
    used_gib, read_s = (total - free) / 2**30, time.thread_time() - began
    found = {"idle": idle.busy, "busy": busy[-1], "memory_gib": seen.memory_gib, "by_cuda_gib": used_gib}
    assert busy[-1] is not None, found
    assert busy[-1] > 0.8, found
    # NVML counts what the driver has reserved on some GPUs, too, which CUDA leaves out of the total.
    assert seen.memory_gib is not None, found
    assert abs(seen.memory_gib - used_gib) < 1.5, found
    return {**found, "num_reads": num_reads, "cpu_s_with_the_loop": read_s}


@dataclass(frozen=True)
class Check:
    """One thing to check; on a GPU the stand-ins for `cpu` are left out, without one those for `cuda` are not run."""

    name: str
    run: Callable[[], dict[str, Any]]
    only_on: Literal["cuda", "cpu"] | None = None


def all_checks(place: Workplace, device: torch.device) -> list[Check]:
    """Return all checks, in the order in which they are run."""
    small, deep, large = gpu_loops.cases(device, tiny=place.tiny)
    forked, group = partial(check_forked_worker, place), partial(check_group, device)
    return [
        Check("forked worker, gloo", forked, "cpu"),
        Check("forked worker, CUDA and NCCL", forked, "cuda"),
        Check("group of one, gloo", group, "cpu"),
        Check("group of one, NCCL", group, "cuda"),
        Check("how busy the GPU is, by NVML", partial(check_machine_use, device), "cuda"),
        Check("bf16 trains", partial(check_precision, place, "bf16")),
        Check("fp16 trains", partial(check_precision, place, "fp16")),
        Check("exact resume, bf16", partial(check_resume, place, "bf16")),
        Check("exact resume, fp16", partial(check_resume, place, "fp16")),
        Check("checkpoint copy, bytes", partial(gpu_loops.check_copied_bytes, large, device)),
        Check("checkpoint copy, pinned and beside the step", partial(gpu_loops.measure_copy, large, device), "cuda"),
        Check("samples/s, MiniResNet", partial(gpu_loops.measure_rates, small, device)),
        Check("samples/s, ResNet-50", partial(gpu_loops.measure_rates, deep, device)),
        Check("cost of determinism, MiniResNet", partial(gpu_loops.measure_determinism, small, device)),
        Check("cost of determinism, ResNet-50", partial(gpu_loops.measure_determinism, deep, device)),
    ]


# --- the command -----------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What came of a check; `ok` is None where it was not run."""

    check: str
    ok: bool | None
    seconds: float = 0.0
    numbers: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


def outcome_of(check: Check, device: torch.device, *, spent_s: float) -> Outcome:
    """Run a check; what it dies of is part of the outcome."""
    if check.only_on == "cuda" and device.type == "cpu":
        return Outcome(check.name, ok=None, error=NEEDS_CUDA)
    if spent_s > LIMIT_S:
        return Outcome(check.name, ok=False, error=f"not begun: {spent_s:.0f} s were spent before it")
    began = time.monotonic()
    try:
        numbers = check.run()
    except Exception:  # noqa: BLE001  the other checks go on
        return Outcome(check.name, ok=False, seconds=time.monotonic() - began, error=traceback.format_exc())
    return Outcome(check.name, ok=True, seconds=time.monotonic() - began, numbers=numbers)


def machine(device: torch.device, *, tiny: bool) -> dict[str, Any]:
    """Return what the figures depend on."""
    found = {**surroundings(), "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "tiny": tiny, "device": "cpu"}
    if device.type == "cpu":
        return found
    properties = torch.cuda.get_device_properties(device)
    return {
        **found,
        "device": properties.name,
        "device_memory_gib": round(properties.total_memory / 2**30, 1),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as plain text, one line a check, with the rates of each loop below."""
    words = {True: "ok", False: "FAILED", None: NEEDS_CUDA}
    lines = []
    for outcome in outcomes:
        plain = {key: value for key, value in outcome.numbers.items() if isinstance(value, int | float | str)}
        figures = "  ".join(f"{key} {value:.4g}" for key, value in plain.items() if not isinstance(value, str))
        last_words = (outcome.error or "").strip().splitlines()[-1:] if outcome.ok is False else [figures]
        lines.append(f"{outcome.check:44s} {words[outcome.ok]:20s} {outcome.seconds:6.1f} s  {' '.join(last_words)}")
        for row, spread in outcome.numbers.get(gpu_loops.RATE, {}).items():
            span = f"({spread['lowest']:.0f} to {spread['highest']:.0f})"
            lines.append(f"    {row:40s} {spread['median']:12.0f} samples/s {span}")
    return "\n".join(lines)


def run_all(device: torch.device, *, tiny: bool, output: Path | None) -> int:
    """Run all checks, writing the file after each; return the exit code."""
    began = time.monotonic()
    seen = machine(device, tiny=tiny)
    slug = re.sub(r"[^a-z0-9]+", "-", seen["device"].lower()).strip("-")
    path = output or RESULTS / f"gpu_check-{slug}{'-tiny' if tiny else ''}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        for check in all_checks(Workplace(Path(folder), device.type, tiny), device):
            if check.only_on == "cpu" and device.type == "cuda":
                continue
            print(f"[{time.monotonic() - began:4.0f} s] {check.name} ...", flush=True)
            outcomes.append(outcome_of(check, device, spent_s=time.monotonic() - began))
            if outcomes[-1].ok is False:
                print(outcomes[-1].error, flush=True)
            content = {
                **seen,
                "loops": gpu_loops.LOOPS,
                "seconds": time.monotonic() - began,
                "checks": [asdict(one) for one in outcomes],
            }
            path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"\n{table(outcomes)}\n\n{seen['device']}, {time.monotonic() - began:.0f} s; written to {path}")
    return int(any(outcome.ok is False for outcome in outcomes))


def main(argv: Sequence[str] | None = None) -> int:
    """Read the arguments, refuse what cannot be, run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes that go, to prove the script")
    parser.add_argument("--output", type=Path, help="the JSON file; default: benchmarks/results/gpu_check-DEVICE.json")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            f"error: `--device` is cuda, but PyTorch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU here. "
            "Run this on a machine with one, or prove the script itself with `--device cpu --tiny`.",
            file=sys.stderr,
        )
        return 2
    if args.device == "cpu" and not args.tiny:
        print("error: `--device` is cpu, but the full sizes are for a GPU. Add `--tiny`.", file=sys.stderr)
        return 2
    os.environ.update({**LO, **os.environ})
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    return run_all(device, tiny=args.tiny, output=args.output)


if __name__ == "__main__":
    sys.exit(main())
