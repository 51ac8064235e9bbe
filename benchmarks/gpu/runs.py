"""Checks that submit runs, as users do, and read what these left: each returns its figures, and `table` judges them."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.gpu.place import (
    CONFIGS,
    DIGITS,
    FAULTY,
    ROOT,
    Figures,
    Place,
    await_end,
    awaited,
    gpu_memory_mib,
    losses,
    newest_step,
    numbers,
    processes_of,
    require,
    require_flight_record,
)
from ddp_hpc.base.durable import read_json_lines
from ddp_hpc.base.processes import is_locked, kill, kill_all_below
from ddp_hpc.run.run_dir.paths import RunDir

SMALL = ("recipe.args.model=mini_resnet", "recipe.args.image_size=16")


def _report(place: Place, suffix: str = "") -> Figures:
    content: Figures = json.loads(place.path.joinpath(f"report.json{suffix}").read_text())
    return content


# --- workers ---------------------------------------------------------------------------------------------------------


def forked(place: Place) -> Figures:
    """Have a forked worker all-reduce on its device."""
    place.finished(
        "forked", FAULTY, "recipe.args.how=forked", f"recipe.args.report={place.report()}", "train.max_steps=5"
    )
    return _report(place)


TOUCHING = """\
import threading, time
import torch
from benchmarks.gpu.recipes import build
if {has_cuda}:
    torch.zeros(1, device="cuda")
else:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""


def touched(place: Place) -> Figures:
    """Train a recipe whose import leaves what does not survive a fork: CUDA, or without a GPU a thread."""
    (place.path / "touching.py").write_text(TOUCHING.format(has_cuda=place.has_cuda))
    words = ["recipe.target=touching:build", "recipe.args.how=forked", f"recipe.args.report={place.report()}"]
    run = place.finished("touched", FAULTY, *words, "train.max_steps=5")
    return {**_report(place), "said": place.console(run)}


# --- precision -------------------------------------------------------------------------------------------------------


def trains(place: Place, *words: str) -> Figures:
    """Train an ordinary recipe."""
    run = place.finished("trains", *place.digits, "train.max_steps=100", "train.epochs=100", *words)
    lines = [record for record in read_json_lines(run.metrics) if record["kind"] == "train"]
    return {"losses": [line["loss"] for line in lines], "rates_in_lines": [line["samples_per_s"] for line in lines]}


def fused_sgd(place: Place) -> Figures:
    """Train in fp16 by a recipe's own SGD with momentum, fused and not, where the first update overflows."""
    losses_of, skipped = {}, {}
    for kind, fused in (("fused", "true"), ("stock", "false")):
        words = ["train.precision=fp16", "recipe.args.how=sgd", f"recipe.args.fused={fused}", "train.max_steps=60"]
        run = place.finished(kind, FAULTY, *words)
        lines = [line for line in read_json_lines(run.metrics) if line["kind"] == "train"]
        losses_of[kind], skipped[kind] = losses(run), sum(line["skipped_updates"] for line in lines)
    return {"losses": losses_of, "skipped": skipped}


FLAGS = "import json; from benchmarks.gpu.recipes import tf32_flags; print(json.dumps(tf32_flags()))"


def fp32_flags(place: Place) -> Figures:
    """Read what a forward in fp32 finds, and what a new process has."""
    place.finished(
        "flags", FAULTY, "recipe.args.how=flags", f"recipe.args.report={place.report()}", "train.max_steps=3"
    )
    fresh = json.loads(place.run(sys.executable, "-c", FLAGS).text.strip().splitlines()[-1])
    return {"ours": _report(place), "pytorch": fresh}


# --- exact resume ----------------------------------------------------------------------------------------------------


def resume(place: Place, *words: str, workers: int = 1) -> Figures:
    """Compare a whole run with one that is killed: one worker, then all processes at once; in small only the latter."""
    steps, every = (120, 10) if place.tiny else (500, 25)
    asked = [
        *place.digits,
        f"train.max_steps={steps}",
        "train.epochs=1000",
        "train.deterministic=true",
        "train.lr=0.001",
    ]
    asked += [f"checkpoint.every_steps={every}", "train.grad_clip_norm=1.0", "optimizer.name=adamw", *words]
    whole = place.finished("whole", *asked, workers=workers)
    killed_at = []
    for kind in ("all",) if place.tiny and workers == 1 else ("worker", "all"):
        run, _ = place.submit("killed", *asked, workers=workers, wait=False)
        before = newest_step(run)
        awaited(lambda run=run, before=before: newest_step(run) > before or run.done.exists(), "a checkpoint")  # type: ignore[misc]
        if not run.done.exists():
            top, kin = processes_of(run)
            if kind == "worker":
                kill([kin[-1].pid])
            else:
                kill_all_below([top.pid])
            killed_at.append(newest_step(run))
            await_end(run)
    run = place.finished("killed", *asked, workers=workers)
    return {
        "steps": steps,
        "killed_at": killed_at,
        "resumed": re.findall(r"resumed at step (\d+)", place.console(run)),
        "digests": [place.digest(whole), place.digest(run)],
        "same_metrics": numbers(whole) == numbers(run),
    }


def replayed(place: Place) -> Figures:
    """Replay a piece of a deterministic run, and audit it."""
    for name in ("tiny_lm.py", "tiny_lm.yaml"):
        shutil.copy(ROOT / "examples" / name, place.path)
    words = ["train.deterministic=true", "checkpoint.every_steps=10", "checkpoint.keep_last=10", "train.max_steps=40"]
    words += ["recipe.args.width=32", "train.epochs=1", *(["train.precision=bf16"] if place.has_cuda else [])]
    place.finished("lm", "tiny_lm.yaml", *words)
    replay = place.ddp_hpc("replay", "lm", "--from", "10", "--to", "30")
    audit = place.ddp_hpc("audit", "lm", "--segments", "1")
    return {"replay_rc": replay.rc, "replay": replay.text, "audit_rc": audit.rc, "audit": audit.text}


CERTIFIED = """\
import os, time, torch, torch.distributed as dist
has_cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if has_cuda else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_cuda else torch.device("cpu")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).to(device))
optimizer, first = torch.optim.Adam(model.parameters(), 1e-2), 0
if os.path.exists("state.pt"):
    state = torch.load("state.pt", map_location=device)
    model.module.load_state_dict(state["model"]), optimizer.load_state_dict(state["optimizer"])
    first = state["epoch"]
for epoch in range(first, 12):
    generator = torch.Generator().manual_seed(epoch)
    for _ in range(20):
        inputs = torch.randn(16, 8, generator=generator).to(device)
        loss = (model(inputs) - inputs.flip(1)).square().mean()
        optimizer.zero_grad(), loss.backward(), optimizer.step(), time.sleep(0.01)
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
    torch.save(state, "state.tmp")
    os.replace("state.tmp", "state.pt")
    print(f"epoch {epoch} loss {loss.item():.6f}", flush=True)
dist.destroy_process_group()
"""


def certified(place: Place) -> Figures:
    """Certify a plain script that saves each epoch."""
    folder = place.path / "script"
    folder.mkdir()
    (folder / "train.py").write_text(CERTIFIED)
    faults = ["--faults", "kill-after-save"] if place.tiny else []
    gpus = f"resources.gpus_per_node={int(place.has_cuda)}"
    said = replace(place, path=folder).ddp_hpc("certify", gpus, *faults, "--", "python", "train.py")
    return {"rc": said.rc, "said": said.text}


# --- leaving ---------------------------------------------------------------------------------------------------------


def leaves(place: Place) -> Figures:
    """Kill a worker amid its steps, submit again, and stop the run."""
    words = [*place.digits, "train.epochs=10000", "checkpoint.every_steps=40", "train.precision=bf16"]
    idle = gpu_memory_mib() if place.has_cuda else 0.0

    def seconds_until_free() -> float:
        began = time.monotonic()
        awaited(lambda: not place.has_cuda or gpu_memory_mib() < idle + 100, "the GPU's memory is free")
        return time.monotonic() - began

    run, _ = place.submit("leaves", *words, wait=False)
    awaited(lambda: newest_step(run), "a checkpoint")
    kill([processes_of(run)[1][0].pid])
    found: Figures = {"kill_to_memory_free_s": seconds_until_free(), "kill_to_end_s": await_end(run)}
    place.submit("leaves", *words, wait=False)
    before = newest_step(run)
    awaited(lambda: newest_step(run) > before, "a checkpoint")
    stop = place.ddp_hpc("stop", "leaves")
    found |= {"stop_rc": stop.rc, "stop_to_end_s": await_end(run), "stop_to_memory_free_s": seconds_until_free()}
    status = json.loads(place.ddp_hpc("status", "leaves", "--json").text)
    return {**found, "state": status["state"], "step": status["step"], "saved": newest_step(run)}


# --- two ranks -------------------------------------------------------------------------------------------------------


IS_SLOW = r"rank 1 on \S+ is slow"


def two_ranks(place: Place, how: str, *words: str, until: str) -> Figures:
    """Train on two ranks, the second of which does `how`; return what is said, once it says `until`."""
    if how != "flip":
        require_flight_record()
    run, _ = place.submit(
        "ranks",
        FAULTY,
        f"recipe.args.how='{how}'",
        "train.epochs=10000",
        "train.global_batch_size=16",
        *words,
        workers=2,
        wait=False,
    )
    awaited(lambda: re.search(until, place.console(run)) or not is_locked(run.lock), f"the log says {until!r}")
    place.ddp_hpc("cancel", run.name)
    await_end(run)
    return {"said": place.console(run) + place.ddp_hpc("why", run.name).text}


# --- what is said ----------------------------------------------------------------------------------------------------


def why(place: Place, how: str) -> Figures:
    """Let a run fail; return what `why` says."""
    run, said = place.submit("fails", FAULTY, f"recipe.args.how={how}")
    return {"rc": said.rc, "said": place.ddp_hpc("why", run.name).text}


def on_device(place: Place) -> Figures:
    """Train on data that lies on the device already."""
    run, said = place.submit(
        "on-device", FAULTY, "recipe.args.how='on device'", "train.max_steps=100", "train.epochs=10"
    )
    return {"rc": said.rc, "losses": losses(run) if said.rc == 0 else []}


def too_few_gpus(place: Place) -> Figures:
    """Ask for GPUs that are not there."""
    (place.path / FAULTY).write_text(CONFIGS[FAULTY])
    found: Figures = {"rcs": [], "seconds": [], "said": ""}
    for name, number, env in (("many", 99, None), ("hidden", 1, {"CUDA_VISIBLE_DEVICES": ""})):
        said = place.ddp_hpc("submit", FAULTY, f"name={name}", f"resources.gpus_per_node={number}", "--wait", env=env)
        found["rcs"].append(said.rc)
        found["seconds"].append(said.seconds)
        found["said"] += said.text
    return found


def gpus_unset(place: Place) -> Figures:
    """Train without a word on GPUs, on a machine that has one."""
    config = "recipe: {target: 'benchmarks.gpu.recipes:build'}\ntrain: {epochs: 1, global_batch_size: 32, lr: 0.1}\n"
    (place.path / "unset.yaml").write_text(config)
    words = [
        "recipe.args.how=flags",
        f"recipe.args.report={place.report()}",
        "train.max_steps=3",
        "name=unset",
        "--wait",
    ]
    said = place.ddp_hpc("submit", "unset.yaml", *words)
    return {"rc": said.rc, "device_of_run": _report(place)["device"]}


def profiled(place: Place) -> Figures:
    """Profile a run, and read the shares of its table of operators; then make the report."""
    run = place.finished("profiled", *place.digits, "profile.kind=torch", "train.max_steps=40")
    tables = [path.read_text() for path in run.path.rglob("*.txt") if "%" in path.read_text()]
    shares = [float(share) for table in tables for share in re.findall(r"(\d+(?:\.\d+)?) ?%", table)]
    return {"shares": shares, "report_rc": place.ddp_hpc("report", "profiled").rc, "table": tables[:1]}


def preflight(place: Place) -> Figures:
    """Check the node before the run."""
    _, said = place.submit("preflight", *place.digits, "preflight.enabled=true", "train.max_steps=20")
    return {"rc": said.rc, "said": place.ddp_hpc("doctor").text}


# --- compile ---------------------------------------------------------------------------------------------------------


def compiled(place: Place) -> Figures:
    """Compile an `nn.Sequential` on two ranks; return the number of compiled graphs of each, and what the log says."""
    words = [
        "recipe.args.how=compiled",
        f"recipe.args.report={place.report()}",
        "train.compile=true",
        "train.max_steps=12",
    ]
    run = place.finished("compiled", FAULTY, *words, workers=2)
    return {"graphs": [_report(place, f".{rank}")["graphs"] for rank in range(2)], "said": place.console(run)}


def uneven(place: Place) -> Figures:
    """Compile with channels_last and deterministic algorithms, where an epoch's last batch is smaller."""
    words = [*SMALL, "train.compile=true", "train.channels_last=true", "train.deterministic=true", "train.epochs=12"]
    run, said = place.submit("uneven", DIGITS, *words, "train.global_batch_size=200")
    return {"rc": said.rc, "losses": losses(run) if run.metrics.exists() else [], "said": place.console(run)[-2000:]}


# --- scripts ---------------------------------------------------------------------------------------------------------


def example(place: Place, file: str, package: str = "torch") -> Figures:
    """Run an example script under our launcher."""
    require(package)
    shutil.copy(ROOT / "examples" / file, place.path)
    gpus = f"resources.gpus_per_node={int(place.has_cuda)}"
    name = file.removesuffix(".py").replace("_", "-")
    said = place.ddp_hpc("submit", gpus, f"name={name}", "--wait", "--", "python", file)
    run = RunDir(place.path / "runs" / name)
    return {"rc": said.rc, "saved": newest_step(run), "said": place.console(run)[-2000:], "seconds": said.seconds}


def memory_by_nvml(place: Place) -> Figures:
    """Compare a run's GPU memory, as its status shows it, with what CUDA counts."""
    run = place.finished("sampled", *place.digits, "train.global_batch_size=1024", "train.epochs=40")
    shown = re.search(r"([\d.]+) of ([\d.]+) GiB of GPU memory", place.ddp_hpc("status", run.name).text)
    return {"idle": gpu_memory_mib() / 1024, "shown": float(shown[1]), "total": float(shown[2])} if shown else {}


FIRST = """\
import os, sys, time, torch, torch.distributed as dist
device = "cuda" if sys.argv[2] == "1" else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if device == "cuda" else "gloo")
values = torch.ones(8, device=device)
dist.all_reduce(values)
assert values[0].item() == dist.get_world_size()
open(f"{sys.argv[1]}.{dist.get_rank()}", "w").write(repr(time.time()))
dist.destroy_process_group()
"""


def launch(place: Place) -> Figures:
    """Return the seconds from the command to the last rank's first all-reduce, ours beside torchrun's."""
    (place.path / "first.py").write_text(FIRST)
    found: Figures = {"seconds": {}, "over_torchrun": []}
    for workers in (2,) if place.tiny else (1, 8):
        on_gpu = int(place.has_cuda and workers == 1)
        asked = [f"resources.gpus_per_node={on_gpu}", *([] if on_gpu else [f"resources.workers_per_node={workers}"])]
        torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={workers}", "--standalone", "first.py"]
        taken: dict[str, list[float]] = {"ours": [], "torchrun": []}
        for number in range(1 if place.tiny else 3):
            for who, seconds in taken.items():
                mark, began = str(place.path / f"{who}-{workers}-{number}"), time.time()
                if who == "ours":
                    command = ["--wait", "--", "python", "first.py", mark, str(on_gpu)]
                    place.ddp_hpc("submit", f"name=first-{workers}-{number}", *asked, *command)
                else:
                    place.run(sys.executable, *torchrun, mark, str(on_gpu))
                seconds.append(max(float(Path(f"{mark}.{rank}").read_text()) for rank in range(workers)) - began)
        found["seconds"] |= {f"{who}, {workers} workers": median(seconds) for who, seconds in taken.items()}
        found["over_torchrun"].append(median(taken["ours"]) / median(taken["torchrun"]))
    return found
