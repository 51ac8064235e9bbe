"""What it costs to restore a checkpoint of 400 MB in worlds of 1, 4 and 8: time and memory, beside PyTorch's own ways.

Each world saves the state in each way, and new processes restore it. Ours verifies every byte, on every rank. `torch.load(mmap=True)`
and DCP verify none. `torch.load` maps the optimizer's half and leaves it in the file; the first step, which changes it, waits until
each page is copied. So a second row changes one number of each page. The limit is one process that only reads our files once, in the same round. Memory is a rank's peak, less what
it used before its model was made.
"""

from __future__ import annotations

import mmap
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from benchmarks import checkpoint
from benchmarks.rounds import Benchmark, Row, Samples, Verdict, judge, run_rounds, shown
from ddp_hpc.run.checkpoints import checkpoint_names
from ddp_hpc.run.run_dir import ownership
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import CheckpointSpec
from ddp_hpc.train.data.sample_order import Position
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.state.checkpoint import Checkpointer
from ddp_hpc.train.state.training_state import TrainingState
from tests.distributed.processes import in_group

WORLDS = (1, 4, 8)
TIME_LIMIT, MEMORY_LIMIT = 1.0, 1.2
CHUNK_BYTES = 8 << 20
CAT, OURS = "limit: read the files once, world of {}", "ddp_hpc, world of {}"
MAPPED, COPIED, DCP = (
    "torch.load(mmap=True), world of {}",
    "torch.load(mmap=True), copied, world of {}",
    "DCP, world of {}",
)
SECONDS, MEMORY, SAVE_MEMORY = "restore_s", "peak_mb", "peak_at_save_mb"


def save(group: Group, run_path: Path) -> Mapping[str, float]:
    """Save as the loop does, and in the other ways; return the peak of memory in the loop's way."""
    before = _memory_mb("VmRSS")
    state = _made_state(group, step=1)
    for parameter in state.model.parameters():
        state.optimizer.state[parameter] = {"momentum_buffer": torch.randn_like(parameter)}
    _reset_peak()
    _checkpointer(group, run_path).save_and_wait(state)
    peak = _memory_mb("VmHWM")
    model, optimizer = get_state_dict(state.model, state.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=run_path / "dcp")
    if group.rank_info.is_rank_zero:
        torch.save({"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}, run_path / "one.pt")
    return {MEMORY: peak - before}


def restore(group: Group, run_path: Path, way: Callable[[Group, Path, TrainingState], None]) -> Mapping[str, float]:
    """Restore into a state made anew; return the time and the peak of memory."""
    before = _memory_mb("VmRSS")
    state = _made_state(group, step=0)
    _reset_peak()
    torch.distributed.barrier()
    began = time.perf_counter()
    way(group, run_path, state)
    torch.distributed.barrier()
    return {SECONDS: time.perf_counter() - began, MEMORY: _memory_mb("VmHWM") - before}


def by_ours(group: Group, run_path: Path, state: TrainingState) -> None:
    """Restore as workers do."""
    assert _checkpointer(group, run_path).restore_newest(state, seed=0) == 1


def by_torch(_: Group, run_path: Path, state: TrainingState) -> None:
    """Load as PyTorch's tutorial does, with the file mapped."""
    found = torch.load(run_path / "one.pt", mmap=True, weights_only=True)
    state.model.load_state_dict(found["model"])
    state.optimizer.load_state_dict(found["optimizer"])


def by_torch_copied(group: Group, run_path: Path, state: TrainingState) -> None:
    """Do so, and change one number of each page, as the first step will."""
    by_torch(group, run_path, state)
    for entry in state.optimizer.state.values():
        entry["momentum_buffer"].view(-1)[:: mmap.PAGESIZE // 4].add_(1)


def by_dcp(_: Group, run_path: Path, state: TrainingState) -> None:
    """Load as the tutorial of `torch.distributed.checkpoint` does."""
    model, optimizer = get_state_dict(state.model, state.optimizer)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=run_path / "dcp")
    set_state_dict(state.model, state.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def _made_state(group: Group, *, step: int) -> TrainingState:
    model = checkpoint.Weights()
    return TrainingState(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        device=group.device,
        rank=group.rank_info.rank,
        world_size=group.rank_info.world_size,
        loss_meter=torch.zeros(()),
        position=Position(step=step),
    )


def _checkpointer(group: Group, run_path: Path) -> Checkpointer:
    return Checkpointer(RunDir(run_path), group, attempt=0, keep=CheckpointSpec())


def _memory_mb(name: str) -> float:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[name].split()[0]) * 1024 / 1e6


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


class Workbench:
    """A run a world, with one checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._at_save: dict[int, float] = {}
        for world_size in WORLDS:
            run = self._run(world_size)
            run.path.mkdir()
            run.config.touch()
            ownership.claim_run(run, 0)
            ranks = in_group(world_size, partial(save, run_path=run.path), self._folder / "answers")
            self._at_save[world_size] = max(one[MEMORY] for one in ranks)

    def read(self, world_size: int) -> Mapping[str, float]:
        """Read the files once, in one process, into one small buffer."""
        buffer = bytearray(CHUNK_BYTES)
        began, num_bytes = time.perf_counter(), 0
        for path in self._shards(world_size):
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    num_bytes += count
        return {SECONDS: time.perf_counter() - began}

    def restore(self, world_size: int, way: Callable[[Group, Path, TrainingState], None]) -> Mapping[str, float]:
        """Restore on all ranks."""
        run = self._run(world_size)
        ranks = in_group(world_size, partial(restore, run_path=run.path, way=way), self._folder / "answers")
        at_save = {SAVE_MEMORY: self._at_save[world_size]} if way is by_ours else {}
        return {SECONDS: max(one[SECONDS] for one in ranks), MEMORY: max(one[MEMORY] for one in ranks), **at_save}

    def _run(self, world_size: int) -> RunDir:
        return RunDir(self._folder / f"world-{world_size}")

    def _shards(self, world_size: int) -> list[Path]:
        return sorted(checkpoint_names.checkpoint_path(self._run(world_size), 1).glob("shard-*"))


def measure(rounds: int) -> Samples:
    """Measure all worlds in turn; the files stay in the page cache, so the disk plays no part."""
    checkpoint.BUILD.mkdir(exist_ok=True)
    torch.set_num_threads(1)  # a forked process must not have had other threads
    torch.optim.SGD([torch.zeros(1, requires_grad=True)]).zero_grad()  # imports once what every fork would import
    with tempfile.TemporaryDirectory(prefix="bench-", dir=checkpoint.BUILD) as folder:
        bench = Workbench(Path(folder))
        ways = {OURS: by_ours, MAPPED: by_torch, COPIED: by_torch_copied, DCP: by_dcp}
        rows = []
        for size in WORLDS:
            rows.append(Row(CAT.format(size), partial(bench.read, size)))
            rows += [Row(name.format(size), partial(bench.restore, size, way)) for name, way in ways.items()]
        return run_rounds("restore", rows, rounds=rounds)


def verdicts(samples: Samples) -> list[Verdict]:
    """Compare ours with the limits."""
    found = []
    for world_size in WORLDS:
        where, ours = f"world of {world_size}", OURS.format(world_size)
        figures = samples.by_row[ours]
        memory = [one / other for one, other in zip(figures[MEMORY], figures[SAVE_MEMORY], strict=True)]
        times = {
            name: samples.ratios(SECONDS, over=ours, under=name.format(world_size))
            for name in (CAT, MAPPED, COPIED, DCP)
        }
        found += [
            judge(f"time, by DCP's, {where}", times[DCP], limit=TIME_LIMIT, wanted="at most"),
            judge(f"time, by torch.load's and the copy, {where}", times[COPIED], limit=TIME_LIMIT, wanted="at most"),
            judge(f"time, by torch.load's, half left in the file, {where}", times[MAPPED]),
            judge(f"time, by that of reading once, {where}", times[CAT]),
            judge(f"peak memory, by that of a save, {where}", memory, limit=MEMORY_LIMIT, wanted="at most"),
        ]
    return found


BENCHMARK = Benchmark(
    name="restore",
    title="Restoring a checkpoint of 403 MB",
    rounds=5,
    measure=measure,
    columns=[
        shown("restore, ms", SECONDS, scale=1e3, digits=0),
        shown("peak, MB", MEMORY, digits=0),
        shown("peak at save, MB", SAVE_MEMORY, digits=0),
    ],
    verdicts=verdicts,
)
