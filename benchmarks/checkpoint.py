"""What a checkpoint of 400 MB costs: how long the loop waits, and how long until the checkpoint is on the disk.

A network and its momentum, half each, the same tensors for all. The limits are a copy into buffers that are made once,
and one file written and flushed. Ours is the real `Checkpointer` with checksums and commit protocol. Nothing is being
written when a save begins, and the files of the save before are deleted before the clock starts.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

from benchmarks.rounds import Benchmark, Row, Samples, Verdict, compared, judge, run_rounds, shown
from ddp_hpc.base.durable import fsync_path
from ddp_hpc.run.checkpoints import checkpoint_names
from ddp_hpc.run.run_dir import ownership
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import CheckpointSpec
from ddp_hpc.train import process_group
from ddp_hpc.train.process_group import Group, RankInfo
from ddp_hpc.train.state import training_state
from ddp_hpc.train.state.checkpoint import Checkpointer
from ddp_hpc.train.state.training_state import TrainingState

BUILD = Path(__file__).resolve().parent.parent / "build"
"""Where it writes: on the disk of the checkout."""
NUM_WEIGHTS, SHAPE = 24, (1024, 2048)
CHUNK_BYTES = 64 << 20
STALL_LIMIT, DISK_LIMIT, EARLY_LIMIT = 1.5, 0.85, 0.95

COPY, WRITE, WRITE_EARLY = "limit: copy into reused buffers", "limit: write, fsync", "write begun early, fsync"
OURS, OURS_PRUNING = "ddp_hpc", "ddp_hpc, deleting an older one"
TORCH, DCP = "torch.save, fsync", "DCP async_save, thread"
STALL, DISK, BANDWIDTH = "stall_s", "on_disk_s", "gb_per_s"


class Weights(nn.Module):
    """Half of the state; the optimizer's momentum is the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ParameterList(torch.randn(SHAPE) for _ in range(NUM_WEIGHTS))


def made_state(group: Group) -> TrainingState:
    """Return a training state after one step, so that there is momentum."""
    model = Weights()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    meter = torch.zeros(())
    return TrainingState(model=model, optimizer=optimizer, device=group.device, rank=0, world_size=1, loss_meter=meter)


def _stager() -> DefaultStager:
    """Return DCP's copier for the CPU, which keeps its buffers as long as it lives."""
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
    )


class Workbench:
    """The state, the buffers it is copied into, and the directory it is written to."""

    def __init__(self, group: Group, folder: Path) -> None:
        self._folder = folder
        self._state = made_state(group)
        self._tensors = {item.name: item.tensor.detach() for item in training_state.tensors(self._state)}
        self._copies = {name: tensor.clone() for name, tensor in self._tensors.items()}
        self._num_bytes = sum(tensor.nbytes for tensor in self._tensors.values())
        self._run = RunDir(folder / "run")
        self._checkpointer = Checkpointer(self._run, group, attempt=0, keep=CheckpointSpec(keep_last=1))
        self._dcp_stager = _stager()

    def copy(self) -> Mapping[str, float]:
        """Copy tensor by tensor."""
        began = time.perf_counter()
        for name, tensor in self._tensors.items():
            self._copies[name].copy_(tensor)
        return {STALL: time.perf_counter() - began}

    def write(self, *, is_begun_early: bool) -> Mapping[str, float]:
        """Write the bytes of all tensors to one file and flush it; with `is_begun_early`, the kernel starts with each chunk."""
        self._clean()
        views = [_bytes_of(tensor) for tensor in self._copies.values()]
        began = time.perf_counter()
        with (self._folder / "raw").open("wb", buffering=0) as file:
            for view in views:
                _write_all(file.fileno(), view)
                if is_begun_early:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            os.fsync(file.fileno())
        return self._durable(time.perf_counter() - began)

    def ours(self, *, is_pruning: bool) -> Mapping[str, float]:
        """Save as the loop does, and wait until it is committed."""
        self._clean()
        self._run.path.mkdir()
        ownership.claim_run(self._run, 0)
        if is_pruning:
            self._save()
            os.sync()
        return self._save()

    def _save(self) -> Mapping[str, float]:
        step = self._state.position.step + 1
        self._state.position = replace(self._state.position, step=step)
        began = time.perf_counter()
        self._checkpointer.save(self._state)
        stall = time.perf_counter() - began
        self._checkpointer.save_and_wait(self._state)  # it has been copied already: waits, and raises where it failed
        on_disk = time.perf_counter() - began
        assert checkpoint_names.committed_steps(self._run) == [step]
        return {STALL: stall, **self._durable(on_disk)}

    def torch_save(self) -> Mapping[str, float]:
        """Save with torch.save, flush file and directory; the loop waits for all of it."""
        self._clean()
        path = self._folder / "state.pt"
        began = time.perf_counter()
        torch.save(self._tensors, path)
        fsync_path(path)
        fsync_path(self._folder)
        seconds = time.perf_counter() - began
        return {STALL: seconds, **self._durable(seconds)}

    def dcp(self) -> Mapping[str, float]:
        """Save with DCP's thread, which flushes files, as is its default, but no directory."""
        self._clean()
        began = time.perf_counter()
        saving = async_save(
            self._tensors,
            checkpoint_id=self._folder / "dcp",
            async_checkpointer_type=AsyncCheckpointerType.THREAD,
            async_stager=self._dcp_stager,
        )
        stall = time.perf_counter() - began
        written = saving if isinstance(saving, Future) else saving.upload_completion
        written.result()
        return {STALL: stall, **self._durable(time.perf_counter() - began)}

    def _durable(self, seconds: float) -> dict[str, float]:
        return {DISK: seconds, BANDWIDTH: self._num_bytes / seconds / 1e9}

    def _clean(self) -> None:
        """Delete all files, and wait until the disk is idle."""
        for path in self._folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        os.sync()


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy says so only from Python 3.12 on


def _write_all(fd: int, view: memoryview) -> None:
    while view:
        view = view[os.write(fd, view[:CHUNK_BYTES]) :]


def measure(rounds: int) -> Samples:
    """Measure all in one process, on all CPUs of the machine."""
    BUILD.mkdir(exist_ok=True)
    place = RankInfo(
        rank=0, local_rank=0, world_size=1, local_world_size=1, node_rank=0, master_addr="127.0.0.1", master_port=0
    )
    group = process_group.join(place, torch.device("cpu"))
    with tempfile.TemporaryDirectory(prefix="bench-", dir=BUILD) as folder:
        bench = Workbench(group, Path(folder))
        rows = [
            Row(COPY, bench.copy),
            Row(WRITE, partial(bench.write, is_begun_early=False)),
            Row(WRITE_EARLY, partial(bench.write, is_begun_early=True)),
            Row(OURS, partial(bench.ours, is_pruning=False)),
            Row(OURS_PRUNING, partial(bench.ours, is_pruning=True)),
            Row(DCP, bench.dcp),
            Row(TORCH, bench.torch_save),
        ]
        samples = run_rounds("checkpoint", rows, rounds=rounds)
    process_group.leave_process_group()
    return samples


def verdicts(samples: Samples) -> list[Verdict]:
    """Compare ours with the limits."""
    stall = samples.ratios(STALL, over=OURS, under=COPY)
    share = samples.ratios(BANDWIDTH, over=OURS, under=WRITE)
    early_share = samples.ratios(BANDWIDTH, over=OURS, under=WRITE_EARLY)
    ours, copies, writes = (samples.by_row[row] for row in (OURS, COPY, WRITE_EARLY))
    apart = [(copy + write) / whole for copy, write, whole in zip(copies[STALL], writes[DISK], ours[DISK], strict=True)]
    less_stall = samples.ratios(STALL, over=DCP, under=OURS)
    faster = samples.ratios(BANDWIDTH, over=OURS, under=TORCH)
    return [
        judge("stall, by a copy's", stall, limit=STALL_LIMIT, wanted="at most"),
        judge("bandwidth to the disk, by that of write and fsync", share, limit=DISK_LIMIT),
        judge("bandwidth to the disk, by that of a write begun early", early_share, limit=EARLY_LIMIT),
        judge("time of a copy, then a write begun early, by ours", apart),
        judge("stall of DCP's thread, by ours", less_stall),
        judge("bandwidth to the disk, by that of torch.save and fsync", faster),
    ]


BENCHMARK = Benchmark(
    name="checkpoint",
    title="A checkpoint of 403 MB",
    rounds=15,
    measure=measure,
    columns=[
        shown("stall, ms", STALL, scale=1e3, digits=1),
        compared("by a copy's", STALL, under=COPY),
        shown("on the disk after, ms", DISK, scale=1e3, digits=0),
        shown("GB/s", BANDWIDTH),
        compared("by that of write, fsync", BANDWIDTH, under=WRITE),
    ],
    verdicts=verdicts,
)
