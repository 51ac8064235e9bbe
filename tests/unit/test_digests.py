"""The digest of the training state: any change of a bit or of a place changes it, and nothing else does."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from ddp_hpc.train.process_group import Group, RankInfo
from ddp_hpc.train.sealed_store import SealedStore
from ddp_hpc.train.state import digests
from ddp_hpc.train.state.training_state import DTYPE_NAMES

SHAPES = [(), (0,), (1,), (3,), (7, 5), (2, 3, 5, 7), (4096,), (8192,), (4096 * 2 + 3,), (123, 457)]


def of(tensor: Tensor) -> int:
    return digests.digests_of_tensors({"x": tensor})["x"]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    numbers = torch.randint(
        0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return (numbers[..., 0] > 127) if dtype == torch.bool else numbers.view(dtype).squeeze(-1)


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=str)
def test_one_flipped_bit_of_any_dtype_and_shape_changes_the_digest(dtype: torch.dtype) -> None:
    chosen = random.Random(1)
    for shape in SHAPES:
        tensor = random_tensor(shape, dtype)
        before, of_bytes = of(tensor), tensor.reshape(-1).view(torch.uint8)
        for _ in range(12 if tensor.numel() else 0):
            place, bit = chosen.randrange(of_bytes.numel()), 1 if dtype == torch.bool else 1 << chosen.randrange(8)
            of_bytes[place] ^= bit

            assert of(tensor) != before, (shape, place, bit)

            of_bytes[place] ^= bit
        assert of(tensor) == before


def test_every_single_bit_of_a_tensor_counts() -> None:
    of_bytes = torch.zeros(4096 * 8 + 13, dtype=torch.uint8)
    places = [*range(0, 4096 * 8, 1009), *range(4096 * 8 - 2, 4096 * 8 + 13)]
    seen = {of(of_bytes)}
    for place in places:
        for bit in range(8):
            of_bytes[place] ^= 1 << bit
            seen.add(of(of_bytes))
            of_bytes[place] ^= 1 << bit

    assert len(seen) == 1 + 8 * len(places)


def test_two_exchanged_elements_change_the_digest() -> None:
    chosen = random.Random(2)
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        tensor = random_tensor((20000,), dtype, seed=3)
        before = of(tensor)
        for _ in range(50):
            one, other = chosen.sample(range(tensor.numel()), 2)
            if torch.equal(tensor[one : one + 1].view(torch.uint8), tensor[other : other + 1].view(torch.uint8)):
                continue
            exchanged = tensor.clone()
            exchanged[one], exchanged[other] = tensor[other], tensor[one]

            assert of(exchanged) != before, (dtype, one, other)


@pytest.mark.parametrize("places", [(1, 9), (1, 8193), (3, 8195), (12001, 16001)])
def test_a_number_and_its_negative_that_are_exchanged_change_the_digest(places: tuple[int, int]) -> None:
    one, other = places
    tensor = torch.zeros(20000)
    tensor[one], tensor[other] = 1.5, -1.5
    before = of(tensor)
    tensor[one], tensor[other] = -1.5, 1.5

    assert of(tensor) != before


def test_zeros_of_other_lengths_and_minus_zero_have_other_digests() -> None:
    lengths = [0, 1, 2, 3, 4096, 8192, 8193, 16384]

    assert len({of(torch.zeros(length)) for length in lengths}) == len(lengths)
    assert of(torch.zeros(8)) != of(-torch.zeros(8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_memory_format_strides_and_neighbours_do_not_matter(dtype: torch.dtype) -> None:
    plain = random_tensor((9, 6, 5, 7), dtype)
    wide = torch.zeros(9, 6, 5, 14, dtype=dtype)
    wide[..., ::2] = plain
    shifted = torch.cat([torch.zeros(1, dtype=dtype), plain.reshape(-1)])[1:].view(plain.shape)
    assert of(torch.ones(8, dtype=dtype)[3::5]) == of(torch.ones(1, dtype=dtype))
    same = [
        plain.to(memory_format=torch.channels_last),
        plain.transpose(0, 1).contiguous().transpose(0, 1),
        wide[..., ::2],
        shifted,
    ]

    assert {of(tensor) for tensor in same} == {of(plain)}
    assert digests.digests_of_tensors({"before": torch.ones(3), "x": plain, "after": wide})["x"] == of(plain)


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=str)
def test_a_tensor_among_many_that_are_alike_has_the_digest_that_it_has_alone(dtype: torch.dtype) -> None:
    many = {
        f"{shape} {number}": random_tensor(shape, dtype, seed=number)
        for shape in ((), (0,), (1,), (3,), (8,), (13,))
        for number in range(70)
    }

    found = digests.digests_of_tensors({**many, "large": random_tensor((70, 70), dtype)})

    assert len(set(found.values())) > len(many) // 2 or dtype.itemsize == 1
    assert all(found[name] == of(tensor) for name, tensor in list(many.items())[::23])


def test_groups_of_bounded_size_have_the_same_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    some = {f"{length} {more}": torch.randn(length) for length in range(0, 9000, 700) for more in range(70)}
    before = digests.digests_of_tensors(some)

    monkeypatch.setattr(digests, "_MOST_BYTES", 20_000)

    assert len([*digests._group_places([*some.values()])]) > 20
    assert digests.digests_of_tensors(some) == before


def test_the_numbers_of_a_group_are_bounded_however_many_tensors_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    some = [torch.zeros(length) for length, num in ((10, 9000), (8188, 500), (90_000, 20)) for _ in range(num)]
    monkeypatch.setattr(digests, "_MOST_BYTES", 1 << 20)

    groups = [*digests._group_places(some)]

    assert len(groups) > 4
    for places, _ in groups:
        kept = sum(part.numel() * 8 for place in places for part in digests._row_column_sums(some[place]))
        assert kept <= digests._MOST_BYTES


def test_nothing_keeps_the_copy_of_a_tensor_that_is_not_contiguous() -> None:
    for length in (500, 503):
        parts = digests._row_column_sums(torch.ones(100, length).t())

        assert sum(part.untyped_storage().nbytes() for part in parts) < 20_000


def test_the_number_of_threads_does_not_matter() -> None:
    tensor = random_tensor((1 << 20,), torch.float32)
    before = torch.get_num_threads()
    try:
        found = set()
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            found.add(of(tensor))
    finally:
        torch.set_num_threads(before)

    assert len(found) == 1


def test_the_digest_is_the_same_in_each_version_and_on_each_machine() -> None:
    """Runs of different days are compared, so these numbers must not change."""
    assert of(torch.arange(10.0)) == 2882536630942534073
    assert of(torch.arange(10000.0)) == -4028977185413573000
    assert of(torch.arange(5, dtype=torch.int8)) == -5678316000289775155
    assert digests.combined_digest({"a": 1, "b": -1}) == "8ab91ac94fdfec6f"


def test_no_element_of_nan_or_a_parameter_that_requires_gradients_disturbs_it() -> None:
    values = torch.tensor([float("nan"), float("inf"), 0.0])

    assert of(values) == of(values.clone()) == of(torch.nn.Parameter(values))


def test_the_digest_of_all_does_not_depend_on_the_order_which_a_restore_changes() -> None:
    assert digests.combined_digest({"b": 2, "a": 1}) == digests.combined_digest({"a": 1, "b": 2})


def test_the_digest_of_all_depends_on_names_and_each_digest() -> None:
    ones = [{"a": 1, "b": 2}, {"a": 2, "b": 1}, {"a": 1, "c": 2}, {"a": 1}, {}]

    texts = [digests.combined_digest(one) for one in ones]

    assert len(set(texts)) == len(texts)
    # As the ranks exchange them, too.
    here = RankInfo(rank=0, local_rank=0, world_size=1, local_world_size=1, node_rank=0, master_addr="", master_port=0)
    alone = Group(here, torch.device("cpu"), *(SealedStore(torch.distributed.HashStore(), "") for _ in range(2)))
    assert all(alone.gather_digests(text) == [text] for text in [*texts, "8000000000000000", "ff" * 8])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_computes_the_same_digests_as_a_cpu() -> None:
    for dtype in DTYPE_NAMES:
        for shape in SHAPES:
            tensor = random_tensor(shape, dtype)

            assert of(tensor.cuda()) == of(tensor), (dtype, shape)
