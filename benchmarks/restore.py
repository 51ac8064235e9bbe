"""What it costs to restore a checkpoint of 400 MB in worlds of 1, 4 and 8: bytes read, memory, and time.

Each world saves the state, so that there is one shard for each rank, and new processes restore it. The limit is one process
that only reads the same files once, in the same round. The kernel counts the reads of the thread that does them, whether
the page cache has the bytes or not. Memory is a rank's peak, less what it used before its model was made.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

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
READ_LIMIT, MEMORY_LIMIT = 1.01, 1.2
CHUNK_BYTES = 8 << 20
CAT, OURS = "limit: read the files once, world of {}", "ddp_hpc, world of {}"
SECONDS, READ, MEMORY, SAVE_MEMORY = "restore_s", "read_by_checkpoint", "peak_mb", "peak_at_save_mb"


def save(group: Group, run_path: Path) -> Mapping[str, float]:
    """Save as the loop does; return the peak of memory."""
    before = _memory_mb("VmRSS")
    state = _made_state(group, step=1)
    for parameter in state.model.parameters():
        state.optimizer.state[parameter] = {"momentum_buffer": torch.randn_like(parameter)}
    _reset_peak()
    _checkpointer(group, run_path).save_and_wait(state)
    return {MEMORY: _memory_mb("VmHWM") - before}


def restore(group: Group, run_path: Path) -> Mapping[str, float]:
    """Restore into a state made anew; return the time, what this rank read, and the peak of memory."""
    before = _memory_mb("VmRSS")
    state = _made_state(group, step=0)
    _reset_peak()
    checkpointer = _checkpointer(group, run_path)
    torch.distributed.barrier()
    read, began = _num_read(), time.perf_counter()
    assert checkpointer.restore_newest(state, seed=0) == 1
    torch.distributed.barrier()
    seconds = time.perf_counter() - began
    return {SECONDS: seconds, READ: _num_read() - read, MEMORY: _memory_mb("VmHWM") - before}


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


def _num_read() -> int:
    """Return the bytes that this thread got from reads; what gloo and the store receive counts in other threads."""
    fields = dict(line.split(": ") for line in Path("/proc/thread-self/io").read_text().splitlines())
    return int(fields["rchar"])


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
            ownership.claim(run, 0)
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
        return {SECONDS: time.perf_counter() - began, READ: 1.0}

    def restore(self, world_size: int) -> Mapping[str, float]:
        """Restore on all ranks."""
        run = self._run(world_size)
        ranks = in_group(world_size, partial(restore, run_path=run.path), self._folder / "answers")
        size = sum(path.stat().st_size for path in self._shards(world_size))
        return {
            SECONDS: max(one[SECONDS] for one in ranks),
            READ: sum(one[READ] for one in ranks) / size,
            MEMORY: max(one[MEMORY] for one in ranks),
            SAVE_MEMORY: self._at_save[world_size],
        }

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
        rows = [
            Row(name.format(world_size), partial(do, world_size))
            for world_size in WORLDS
            for name, do in ((CAT, bench.read), (OURS, bench.restore))
        ]
        return run_rounds("restore", rows, rounds=rounds)


def verdicts(samples: Samples) -> list[Verdict]:
    """Compare ours with the limits."""
    found = []
    for world_size in WORLDS:
        ours, cat = OURS.format(world_size), CAT.format(world_size)
        figures = samples.by_row[ours]
        memory = [one / other for one, other in zip(figures[MEMORY], figures[SAVE_MEMORY], strict=True)]
        where = f"world of {world_size}"
        found += [
            judge(f"bytes read, by the checkpoint's, {where}", figures[READ], limit=READ_LIMIT, wanted="at most"),
            judge(f"peak memory, by that of a save, {where}", memory, limit=MEMORY_LIMIT, wanted="at most"),
            judge(f"time, by that of reading once, {where}", samples.ratios(SECONDS, over=ours, under=cat)),
        ]
    return found


BENCHMARK = Benchmark(
    name="restore",
    title="Restoring a checkpoint of 403 MB",
    rounds=5,
    measure=measure,
    columns=[
        shown("restore, ms", SECONDS, scale=1e3, digits=0),
        shown("bytes read, by the checkpoint's", READ, digits=3),
        shown("peak, MB", MEMORY, digits=0),
        shown("peak at save, MB", SAVE_MEMORY, digits=0),
    ],
    verdicts=verdicts,
)
