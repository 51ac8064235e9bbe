"""The checks as a table: what each measures, and what must hold of the figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.gpu import runs
from benchmarks.gpu.place import Figures, Place

Claims = Mapping[str, Callable[[Figures], Any]]
"""Sentences, each with the function of the figures that says whether it holds."""


@dataclass(frozen=True)
class Check:
    """One thing to check. Claims must hold; goals are reported as met or missed."""

    name: str
    family: str
    run: Callable[[Place], Figures]
    claims: Claims
    goals: Claims = field(default_factory=dict)
    part: Literal[1, 2] = 1
    """1: what could be wrong; 2: what is slow."""
    limit_s: float = 150.0
    on: Literal["both", "cuda"] = "both"
    is_alone: bool = False
    """Whether it waits until all others have ended."""
    is_sample: bool = False
    """Whether `make test` runs it, for its family."""


@dataclass(frozen=True)
class Verdict:
    """What came of a check, and why; which goals are met."""

    outcome: Literal["ok", "failed", "skipped"]
    reason: str
    goals: Mapping[str, bool] = field(default_factory=dict)


def judge(check: Check, figures: Figures) -> Verdict:
    """Hold the figures against the claims; one that is missing, or no number, fails: no check passes by doing nothing."""
    held = {says: _held(holds, figures) for says, holds in check.claims.items()}
    goals = {says: _held(holds, figures) == "" for says, holds in check.goals.items()}
    wrong = [f"not so: {says}{why}" for says, why in held.items() if why]
    return Verdict("failed" if wrong or not held else "ok", "; ".join(wrong or held), goals)


def _held(holds: Callable[[Figures], Any], figures: Figures) -> str:
    """Return why a claim does not hold, or nothing."""
    try:
        return "" if holds(figures) else "."
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        return f" ({type(error).__name__}: {error})"


# --- what several checks claim ---------------------------------------------------------------------------------------


def _falls(losses: Sequence[float]) -> bool:
    return len(losses) > 1 and all(map(math.isfinite, losses)) and losses[-1] < 0.6 * losses[0]


def _are_close(some: Sequence[float], others: Sequence[float]) -> bool:
    pairs = list(zip(some, others, strict=True))
    return bool(pairs) and all(math.isclose(*pair, rel_tol=0.05, abs_tol=0.05) for pair in pairs)


def _says(*texts: str, on_gpu: Sequence[str] = ()) -> Claims:
    """Claim that something was said, and has all `texts`, where `a|b` is one of both; `on_gpu` only on a GPU."""

    def has(figures: Figures, texts: Sequence[str]) -> bool:
        return figures["said"] != "" and all(any(one in figures["said"] for one in text.split("|")) for text in texts)

    claims: dict[str, Callable[[Figures], Any]] = {f"it says {', '.join(texts)}": lambda f: has(f, texts)}
    if on_gpu:
        claims[f"on a GPU, it says {', '.join(on_gpu)}"] = lambda f: f["device"] == "cpu" or has(f, on_gpu)
    return claims


FINISHES: Claims = {"the run finishes": lambda f: f["rc"] == 0}
FAILS: Claims = {"the run fails": lambda f: f["rc"] > 0}
TRAINS: Claims = {"the loss stays finite and falls": lambda f: _falls(f["losses"])}
SAVED: Claims = {**FINISHES, "it saves a checkpoint": lambda f: f["saved"] > 0}
EXACT: Claims = {
    "it is killed before its end": lambda f: 0 < max(f["killed_at"]) < f["steps"],
    "it resumes after each kill": lambda f: len(f["resumed"]) == len(f["killed_at"]),
    "the digests are equal": lambda f: f["digests"][0] == f["digests"][1] != "",
    "the metrics are equal": lambda f: f["same_metrics"] is True,
}
RATES: Claims = {
    "each row has a rate": lambda f: len(f["rates"]) > 1 and min(one["low"] for one in f["rates"].values()) > 0
}
BY_HAND: Claims = {"at least 0.98 of the rate of the loop by hand": lambda f: f["over_hand"]["ours"] >= 0.98}
MODEL = ("train.precision=bf16", "train.ema_decay=0.9", "train.channels_last=true")
BLOCKING = "env.CUDA_LAUNCH_BLOCKING=1"


def _in_process(name: str) -> Callable[[Place], Figures]:
    """Return a check of `loops`, which imports PyTorch only when it runs."""

    def run(place: Place) -> Figures:
        from benchmarks.gpu import loops  # late: the table is read without PyTorch

        found: Figures = getattr(loops, name)(place)
        return found

    return run


# --- the table -------------------------------------------------------------------------------------------------------

WORKERS = (
    Check(
        "forked worker",
        "workers",
        runs.forked,
        {
            "the agent has forked the worker": lambda f: "ddp_hpc.job.node.agent" in f["process"],
            "its all-reduce adds up": lambda f: f["all_reduced"] == [2.0],
            "the backend is the device's": lambda f: ("nccl" in f["backend"]) == (f["device"] == "cuda"),
        },
        {"the first all-reduce takes at most 0.3 s": lambda f: f["first_all_reduce_s"] <= 0.3},
        is_sample=True,
    ),
    Check(
        "CUDA or threads at import",
        "workers",
        runs.touched,
        {
            "the worker is a new process": lambda f: "ddp_hpc.job.node.spawned" in f["process"],
            "its all-reduce adds up": lambda f: f["all_reduced"] == [2.0],
            **_says("left threads running|initialised CUDA"),
        },
    ),
    Check(
        "kill and stop",
        "leaving",
        runs.leaves,
        {
            "after a kill, the run ends within 10 s": lambda f: 0 <= f["kill_to_end_s"] < 10,
            "after a kill, the memory is free within 5 s": lambda f: 0 <= f["kill_to_memory_free_s"] < 5,
            "a stop ends the run within 15 s": lambda f: 0 <= f["stop_to_end_s"] < 15,
            "after a stop, the memory is free within 5 s": lambda f: 0 <= f["stop_to_memory_free_s"] < 5,
            "the run is stopped": lambda f: f["state"] == "stopped",
            "its last step is saved": lambda f: 0 < f["step"] == f["saved"],
        },
        is_sample=True,
    ),
)
PRECISION = (
    Check("fp32", "precision", runs.trains, TRAINS, is_sample=True),
    Check("bf16", "precision", lambda p: runs.trains(p, "train.precision=bf16"), TRAINS),
    Check("fp16, SGD", "precision", lambda p: runs.trains(p, "train.precision=fp16"), TRAINS),
    Check(
        "fp16, AdamW",
        "precision",
        lambda p: runs.trains(p, "train.precision=fp16", "optimizer.name=adamw", "train.lr=0.01"),
        TRAINS,
    ),
    Check(
        "fp16, a recipe's fused SGD",
        "precision",
        runs.fused_sgd,
        {
            "both skip the first updates": lambda f: min(f["skipped"].values()) > 0 < len(f["skipped"]),
            "the loss stays finite and falls": lambda f: _falls(f["losses"]["fused"]),
            "fused trains as stock SGD does": lambda f: _are_close(f["losses"]["fused"], f["losses"]["stock"]),
        },
    ),
    Check(
        "fp32 as PyTorch has it",
        "precision",
        runs.fp32_flags,
        {
            "the forward runs on the device": lambda f: f["ours"]["device"] == f["device"],
            "TF32 in products is as by default": lambda f: f["ours"]["matmul"] == f["pytorch"]["matmul"],
            "TF32 in convolutions, too": lambda f: f["ours"]["convolutions"] == f["pytorch"]["convolutions"],
        },
    ),
    Check(
        "no old rate",
        "precision",
        lambda p: runs.trains(p, "train.global_batch_size=96"),
        {
            "no rate stands in more than four lines": lambda f: (
                0 < max(f["rates_in_lines"].count(one) for one in f["rates_in_lines"] if one) <= 4
            )
        },
    ),
)
RESUME = (
    Check("resume, bf16", "resume", lambda p: runs.resume(p, "data.num_workers=2", *MODEL), EXACT),
    Check("resume, fp16", "resume", lambda p: runs.resume(p, "train.precision=fp16"), EXACT, is_sample=True),
    Check(
        "resume, compiled",
        "resume",
        lambda p: runs.resume(p, "train.precision=bf16", "train.compile=true", "data.drop_last=true"),
        EXACT,
        limit_s=240,
        on="cuda",
    ),
    Check("resume, two ranks", "resume", lambda p: runs.resume(p, "integrity.every_steps=5", *MODEL, workers=2), EXACT),
    Check(
        "replay and audit",
        "resume",
        runs.replayed,
        {
            "the replay is the same": lambda f: f["replay_rc"] == 0 and "same" in f["replay"],
            "the audit finds no difference": lambda f: f["audit_rc"] == 0 and f["audit"] != "",
        },
    ),
    Check(
        "certify",
        "scripts",
        runs.certified,
        {"the script resumes exactly": lambda f: f["rc"] == 0 and "exact" in f["said"]},
        limit_s=240,
    ),
)
TWO_RANKS = (
    Check(
        "a rank that hangs",
        "two ranks",
        lambda p: runs.two_ranks(p, "hang", "restart.hang_timeout_s=15", until="wait for rank 1"),
        _says("rank 1", "recipes.py:", "all_reduce"),
    ),
    Check(
        "a rank whose host is slow",
        "two ranks",
        lambda p: runs.two_ranks(p, "slow host", until=runs.IS_SLOW),
        _says("rank 1", "is slow", "cause: forward"),
    ),
    Check(
        "a rank whose samples are slow",
        "two ranks",
        lambda p: runs.two_ranks(p, "slow data", until=runs.IS_SLOW),
        _says("rank 1", "is slow", "cause: data"),
    ),
    Check(
        "a flipped bit",
        "two ranks",
        lambda p: runs.two_ranks(p, "flip", "integrity.every_steps=10", until="layers.0.weight"),
        _says("layers.0.weight"),
        is_sample=True,
    ),
)
SAID = (
    Check(
        "a bad label",
        "why",
        lambda p: runs.why(p, "label"),
        {**FAILS, **_says("out of bounds|out of range|label", on_gpu=["label", BLOCKING])},
        is_sample=True,
    ),
    Check(
        "a bad index",
        "why",
        lambda p: runs.why(p, "index"),
        {**FAILS, **_says("out of range", on_gpu=["index", BLOCKING])},
    ),
    Check(
        "out of memory",
        "why",
        lambda p: runs.why(p, "memory"),
        {**FAILS, **_says("out of memory", "this process has")},
        on="cuda",
    ),
    Check("data on the device", "why", runs.on_device, {**FINISHES, **TRAINS}),
    Check(
        "too few GPUs",
        "GPUs",
        runs.too_few_gpus,
        {
            "too many, and hidden ones, are refused": lambda f: len(f["rcs"]) == 2 and min(f["rcs"]) > 0,
            **_says("CUDA_VISIBLE_DEVICES", "GPU"),
        },
        {"within 2 s": lambda f: max(f["seconds"]) < 2},
        is_sample=True,
    ),
    Check(
        "GPUs by default",
        "GPUs",
        runs.gpus_unset,
        {**FINISHES, "it trains on the GPU": lambda f: f["device_of_run"] == "cuda"},
        on="cuda",
    ),
    Check(
        "memory by NVML",
        "GPUs",
        runs.memory_by_nvml,
        {"`status` shows more than before the run, less than all": lambda f: f["idle"] < f["shown"] < f["total"]},
        on="cuda",
    ),
    Check(
        "profile",
        "records",
        runs.profiled,
        {
            "the table has shares, none above 100 %": lambda f: 0 < max(f["shares"]) <= 100,
            "the report is written": lambda f: f["report_rc"] == 0,
        },
        is_sample=True,
    ),
    Check("preflight", "records", runs.preflight, {**FINISHES, **_says("node")}),
)
SCRIPTS = (
    Check("plain script", "scripts", lambda p: runs.example(p, "plain_torch.py", "torch"), SAVED, is_sample=True),
    Check("Lightning", "scripts", lambda p: runs.example(p, "with_lightning.py", "lightning"), SAVED),
    Check("Accelerate", "scripts", lambda p: runs.example(p, "with_accelerate.py", "accelerate"), SAVED),
    Check("Transformers", "scripts", lambda p: runs.example(p, "with_transformers.py", "transformers"), SAVED),
)
STEPS = (
    Check(
        "compiled Sequential, two ranks",
        "compile",
        runs.compiled,
        {
            "each rank compiles, or the log says why not": lambda f: (
                min(f["graphs"]) > 0 or "`train.compile` " in f["said"]
            )
        },
    ),
    Check("compiled, uneven batches", "compile", runs.uneven, {**FINISHES, **TRAINS}, on="cuda"),
    Check(
        "waits",
        "steps",
        _in_process("waits"),
        {
            "steps were taken": lambda f: {"plain, sgd", "EMA, sgd"} <= f["waits"].keys(),
            "the host waits for the device in no step between two due ones": lambda f: not any(f["waits"].values()),
        },
        is_sample=True,
    ),
    Check(
        "bytes of a save",
        "steps",
        _in_process("copied"),
        {
            "the weights change right after each save": lambda f: len(f["changed"]) > 1 and all(f["changed"]),
            "each save has the bytes from before": lambda f: len(f["equal"]) > 1 and all(f["equal"]),
        },
    ),
)
SLOW = (
    Check(
        "rates, ResNet-50",
        "rates",
        _in_process("resnet50"),
        RATES,
        {
            **BY_HAND,
            "fp32 at least 0.98, too": lambda f: f["over_hand"]["ours, fp32"] >= 0.98,
            "at least 0.98 of it by our loader": lambda f: (
                f["over_hand"]["ours, own loader"] >= 0.98 * f["over_hand"]["ours"]
            ),
        },
        part=2,
        limit_s=270,
    ),
    Check("rates, GPT", "rates", _in_process("gpt"), RATES, BY_HAND, part=2, limit_s=270),
    Check(
        "rates, MiniResNet",
        "rates",
        _in_process("small"),
        RATES,
        {
            **BY_HAND,
            "EMA and skip cost at most 2 %": lambda f: min(f["over_hand"].values()) >= 0.98 * f["over_hand"]["ours"],
        },
        part=2,
        limit_s=270,
        is_sample=True,
    ),
    Check(
        "loader",
        "loader",
        _in_process("loader"),
        {"each row has a rate": lambda f: len(f["over_pytorch"]) > 1 and min(f["over_pytorch"].values()) > 0},
        {"at least 0.95 of the rate of PyTorch's": lambda f: min(f["over_pytorch"].values()) >= 0.95},
        part=2,
        limit_s=270,
        is_sample=True,
    ),
    Check(
        "save",
        "save",
        _in_process("save"),
        {"all is measured": lambda f: min(f[one] for one in ("bytes", "stall_ms", "durable_ms", "dcp_stall_ms")) > 0},
        {
            "the loop stalls at most 3 ms a GB": lambda f: f["stall_ms_a_gb"] <= 3,
            "at least 95 % of the copy is hidden": lambda f: f["hidden_share"] >= 0.95,
            "it pins at most 1.1 times the state": lambda f: f["pinned_bytes"] <= 1.1 * f["bytes"],
        },
        part=2,
        is_sample=True,
    ),
    Check(
        "launch",
        "launch",
        runs.launch,
        {"all ranks meet": lambda f: len(f["seconds"]) > 1 and min(f["seconds"].values()) > 0},
        {"earlier than torchrun's": lambda f: max(f["over_torchrun"]) < 1},
        part=2,
        is_alone=True,
        is_sample=True,
    ),
)
CHECKS = (*RESUME, *TWO_RANKS, *WORKERS, *PRECISION, *STEPS, *SAID, *SCRIPTS, *SLOW)
"""Those that take longest begin first."""
