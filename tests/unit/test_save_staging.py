"""The copy through a staging block gives the bytes that a plain copy gives, in whatever order the device works.

No GPU is here: `LazySide` is a stream beside the one that trains. It runs nothing before something waits for it, which is the worst
order that a device may choose.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_hpc.run.checkpoints import shards
from ddp_hpc.run.run_dir import ownership
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import CheckpointSpec
from ddp_hpc.train.state import training_state
from ddp_hpc.train.state.checkpoint import Checkpointer, partition_tensors
from ddp_hpc.train.state.gpu_staging import SideStream, Staging, packed_ranges, staging_bytes, tensor_windows
from ddp_hpc.train.state.save_buffers import SaveBuffers, block_sizes
from ddp_hpc.train.state.training_state import NamedTensor
from tests.unit.made_state import CPU, alone, make_state, take_step

AMPLE = 1 << 40
_COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default}


@dataclass
class Mark:
    """An event: the first so many copies of the stream have been made."""

    side: LazySide
    number: int

    def synchronize(self) -> None:
        self.side.run(self.number)


class LazySide(SideStream):
    """A stream that copies only when something waits for it; tensors whose names are in `on_cpu` are not in its memory."""

    largest_block = 64

    def __init__(self, *, free: int = AMPLE, on_cpu: Sequence[Tensor] = (), is_full: bool = False) -> None:
        self.free, self.is_full = free, is_full
        self._on_cpu = {id(one) for one in on_cpu}
        self._copies: list[Callable[[], Any]] = []
        self._num_run = 0

    def holds(self, tensor: Tensor) -> bool:
        return id(tensor) not in self._on_cpu

    def free_bytes(self) -> int:
        return self.free

    def staging_block(self, num_bytes: int) -> Tensor:
        if num_bytes and self.is_full:
            raise torch.OutOfMemoryError
        return torch.full((num_bytes,), 0xEE, dtype=torch.uint8)

    def take_again(self, block: Tensor) -> None:
        if self.is_full:
            raise torch.OutOfMemoryError
        if (
            block.untyped_storage().nbytes()
        ):  # CUDA's `resize_` then takes memory a second time, and copies on its stream
            before = block.clone()
            self._copies.append(lambda: block.copy_(before))
        block.untyped_storage().resize_(block.nbytes)

    def host_block(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 0xDD, dtype=torch.uint8)

    @contextmanager
    def use_stream(self) -> Iterator[None]:
        copies = self._copies

        class Late(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
            ) -> Any:
                if func not in _COPIES:
                    return func(*args, **(kwargs or {}))
                copies.append(lambda: func(*args, **(kwargs or {})))
                return args[0] if func is torch.ops.aten.copy_.default else None

        with Late():  # type: ignore[no-untyped-call]  # torch's
            yield

    def wait_for_training(self) -> None:
        """Do nothing: the training's own work is done at once."""

    def record_event(self) -> Any:
        return Mark(self, len(self._copies))

    def hold_training(self, event: Any) -> None:
        event.synchronize()

    def run(self, number: int) -> None:
        with torch.no_grad():
            while self._num_run < number:
                self._copies[self._num_run]()
                self._num_run += 1


def content(buffers: SaveBuffers) -> bytes:
    return b"".join(buffers.shard_parts())


def plain(named: Sequence[NamedTensor]) -> bytes:
    """Return the shard as it is without a staging block."""
    buffers = SaveBuffers(CPU)
    buffers.fill(named)
    return content(buffers)


def all_kinds() -> list[NamedTensor]:
    """Return tensors of every kind that a checkpoint may hold, in the order of a shard; two are buffers, three lie on the CPU."""
    torch.manual_seed(0)
    nhwc = torch.channels_last
    base = torch.randn(4, 6)
    tensors = {
        "bf16": torch.randn(7, 3, dtype=torch.bfloat16),
        "bool": torch.rand(5) > 0.5,
        "buffer": torch.randn(9),
        "complex": torch.randn(3, 2, dtype=torch.complex64),
        "conj": torch.randn(3, 2, dtype=torch.complex64).conj(),
        "empty": torch.empty(0, 4),
        "expanded": torch.randn(3, 1).expand(3, 4),
        "f64": torch.randn(3, dtype=torch.float64),
        "float8": torch.randn(6).to(torch.float8_e4m3fn),
        "fp16": torch.randn(2, 5, dtype=torch.float16),
        "int64": torch.randint(99, (3,)),
        "large": torch.randn(11, 7),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "nhwc": torch.randn(4, 3, 3, 3).to(memory_format=nhwc),
        "nhwc_1x1": torch.randn(4, 3, 1, 1).to(memory_format=nhwc),
        "nhwc_buffer": torch.randn(2, 3, 2, 2).to(memory_format=nhwc),
        "rng": torch.randint(99, (70,), dtype=torch.uint8),
        "shared": base,
        "shared_again": base,
        "step": torch.tensor(3.0),
        "step_of_another": torch.tensor(4.0),
        "strided": torch.randn(8, 6)[::2, 1::2],
        "transposed": torch.randn(5, 6).t(),
        "u16": torch.tensor([1, 2, 65535], dtype=torch.uint16),
        "weight": torch.nn.Parameter(torch.randn(4, 4)),
    }
    named = [NamedTensor(name, one, 0 if "buffer" in name or name == "rng" else None) for name, one in tensors.items()]
    return partition_tensors(named, rank=0, world_size=1)


def on_cpu(named: Sequence[NamedTensor]) -> list[Tensor]:
    return [item.tensor for item in named if item.name in {"rng", "step", "step_of_another"}]


ROOMS = {"room for all": AMPLE, "room for some": 8 * 256, "room for little": 8 * 40, "no room": 0}


def test_each_tensor_goes_to_the_rank_with_the_least_to_write_the_lowest_of_equal_ones() -> None:
    sizes = [int(size) for size in torch.randint(1, 9, (300,), generator=torch.Generator().manual_seed(1))]
    named = [NamedTensor(f"t{number:03}", torch.zeros(size), None) for number, size in enumerate(sizes)]
    loads, expected = [0] * 7, dict[str, int]()
    for item in sorted(named, key=lambda one: -one.tensor.nbytes):
        expected[item.name] = loads.index(min(loads))
        loads[expected[item.name]] += item.tensor.nbytes

    found = {one.name: rank for rank in range(7) for one in partition_tensors(named, rank=rank, world_size=7)}

    assert found == expected


@pytest.mark.parametrize("free", ROOMS.values(), ids=ROOMS)
def test_every_kind_of_tensor_has_the_bytes_of_a_plain_copy(free: int) -> None:
    named = all_kinds()
    buffers = SaveBuffers(CPU, Staging(LazySide(free=free, on_cpu=on_cpu(named))))
    buffers.prepare(named)

    for _ in range(2):
        buffers.fill(named)

        assert content(buffers) == plain(named)


def changed(item: NamedTensor) -> None:
    item.tensor.detach().zero_()


CHANGEABLE = {"buffer", "nhwc_buffer", "rng", "step", "step_of_another", "large", "nhwc", "f64", "bf16", "transposed"}


@pytest.mark.parametrize("free", ROOMS.values(), ids=ROOMS)
def test_a_change_that_the_training_makes_right_after_a_save_does_not_reach_the_copy(free: int) -> None:
    """A forward may move any tensor, as that of a teacher does, and so may a hook of the gradients."""
    named = all_kinds()
    buffers = SaveBuffers(CPU, Staging(LazySide(free=free, on_cpu=on_cpu(named))))
    expected = plain(named)

    buffers.fill(named)
    for item in named:
        if item.name in CHANGEABLE:
            changed(item)

    assert content(buffers) == expected
    assert plain(named) != expected


def test_the_training_waits_for_the_gathering_and_not_for_the_copy_to_the_host() -> None:
    named = all_kinds()
    side = LazySide()
    buffers = SaveBuffers(CPU, Staging(side))

    buffers.fill(named)

    num_to_host = len(block_sizes(len(plain(named)) - len(shards.shard_header([])), largest=side.largest_block))
    assert side._num_run < len(side._copies)
    assert len(side._copies) - side._num_run <= num_to_host


def test_a_save_after_one_that_was_never_written_is_whole() -> None:
    """The writer leaves out a state whose loss is not finite, and then nobody waits for its copy."""
    named = all_kinds()
    buffers = SaveBuffers(CPU, Staging(LazySide(free=8 * 256, on_cpu=on_cpu(named))))

    buffers.fill(named)
    for item in named:
        if item.name in CHANGEABLE:
            changed(item)
    buffers.fill(named)

    assert content(buffers) == plain(named)


def test_sizes_and_layouts_may_change_between_saves() -> None:
    first = all_kinds()
    more = partition_tensors([*first, NamedTensor("late", torch.randn(99), None)], rank=0, world_size=1)
    fewer = more[:5]
    turned = [
        item._replace(tensor=item.tensor.contiguous(memory_format=torch.channels_last)) if item.name == "nhwc" else item
        for item in first
    ]
    buffers, unstaged = SaveBuffers(CPU, Staging(LazySide())), SaveBuffers(CPU)

    for named in (first, more, fewer, turned, first):
        buffers.fill(named)
        unstaged.fill(named)

        assert content(buffers) == content(unstaged) == plain(named)


@pytest.mark.parametrize("when", ["before the first save", "before the second"])
def test_where_the_memory_is_out_tensors_are_copied_from_where_they_lie(when: str) -> None:
    named = all_kinds()
    side = LazySide(is_full=when == "before the first save")
    buffers = SaveBuffers(CPU, Staging(side))
    buffers.fill(named)
    content(buffers)

    side.is_full, side.free = True, 0
    buffers.fill(named)

    assert content(buffers) == plain(named)
    assert buffers.memory["gpu"] == 0


def test_a_training_state_with_an_average_has_the_bytes_of_a_plain_copy() -> None:
    state = make_state(steps=1, ema=True)
    buffers = SaveBuffers(CPU, Staging(LazySide()))

    for _ in range(3):
        named = partition_tensors(training_state.tensors(state), rank=0, world_size=1)
        expected = plain(named)
        buffers.fill(named)
        take_step(state)

        assert content(buffers) == expected


def test_between_saves_the_staging_block_has_no_memory() -> None:
    named = all_kinds()
    staging = Staging(LazySide())
    buffers = SaveBuffers(CPU, staging)

    buffers.prepare(named)
    taken = [staging._block.untyped_storage().nbytes()]
    buffers.fill(named)
    taken.append(staging._block.untyped_storage().nbytes())
    content(buffers)
    taken.append(staging._block.untyped_storage().nbytes())

    assert taken == [0, buffers.memory["gpu"], 0]


@pytest.mark.parametrize(
    ("num_bytes", "sizes"),
    [
        (0, []),
        (5, [5]),
        (16 << 20, [16 << 20]),
        (964_000_000, [1 << 29, 1 << 28, 1 << 27, 1 << 24, 964_000_000 - (57 << 24)]),
        (3 << 30, [1 << 30] * 3),
    ],
)
def test_page_locked_memory_is_taken_in_powers_of_two_of_at_most_a_gibibyte(num_bytes: int, sizes: list[int]) -> None:
    assert block_sizes(num_bytes, largest=SideStream.largest_block) == sizes


@pytest.mark.parametrize(
    ("whole", "free", "room"),
    [(0, 0, 0), (10, 20, 10), (10, 19, 2), (1 << 40, 1 << 36, 256 << 20), (1 << 40, 0, 0)],
)
def test_the_staging_block_takes_at_most_half_of_what_is_free(whole: int, free: int, room: int) -> None:
    assert staging_bytes(whole, free) == room


@pytest.mark.parametrize(
    ("sizes", "room", "expected"),
    [
        ([], 9, []),
        ([4, 4, 1], 9, [[0, 1, 2]]),
        ([4, 4, 1], 8, [[0, 1], [2]]),
        ([9, 4, 4], 8, [[0], [1, 2]]),
        ([1, 1], 0, [[0], [1]]),
    ],
)
def test_tensors_that_fit_together_are_sent_together(sizes: list[int], room: int, expected: list[list[int]]) -> None:
    places = packed_ranges(torch.empty(size, dtype=torch.uint8) for size in sizes)

    assert tensor_windows(range(len(sizes)), places, room) == expected


def test_the_writers_thread_selects_its_gpu_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    selected: list[tuple[str, torch.device]] = []

    def no_gpu(_: object) -> Any:
        raise RuntimeError("No GPU is here.")

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: selected.append((threading.current_thread().name, device))
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", no_gpu)
    run = RunDir(tmp_path)
    ownership.claim_run(run, 0)
    gpu = torch.device("cuda", 3)
    checkpointer = Checkpointer(run, replace(alone(), device=gpu), attempt=0, keep=CheckpointSpec())

    checkpointer.check_after_first_step(make_state(steps=1))
    with pytest.raises(RuntimeError):  # the memory that it asks for next
        checkpointer.wait()

    assert selected == [("checkpoint-writer_0", gpu)]


def test_the_buffers_are_made_after_the_first_step_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDir(tmp_path)
    ownership.claim_run(run, 0)
    told: list[Mapping[str, int]] = []
    checkpointer = Checkpointer(run, alone(), attempt=0, keep=CheckpointSpec(), on_buffers=told.append)
    state = make_state(steps=1)

    with caplog.at_level("INFO"):
        for _ in range(2):
            checkpointer.check_after_first_step(state)
        checkpointer.wait()

    num_bytes = sum(item.tensor.nbytes for item in training_state.tensors(state))
    assert told == [{"host": num_bytes}]
    assert caplog.messages == [f"a save takes {num_bytes / 1e6:.1f} MB of each worker's memory"]


def test_a_replay_makes_no_buffers(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    ownership.claim_run(run, 0)
    told: list[Mapping[str, int]] = []
    checkpointer = Checkpointer(run, alone(), attempt=0, keep=CheckpointSpec(), on_buffers=told.append)

    checkpointer.check_after_first_step(make_state(steps=1), will_save=False)
    checkpointer.wait()

    assert told == []
