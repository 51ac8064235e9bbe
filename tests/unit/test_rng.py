"""Chance as part of the training state."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from ddp_hpc.train.state import rng

CPU = torch.device("cpu")
Draw = tuple[float, float, float, float]


def draw() -> Draw:
    """Draw from every generator, and once more from those that keep a second Gaussian number for later."""
    return (
        torch.rand(()).item(),
        random.random(),
        float(np.random.rand()),  # noqa: NPY002  the global generator is what datasets use
        random.gauss(0, 1) + float(np.random.randn()),  # noqa: NPY002
    )


@pytest.fixture(autouse=True)
def _generators_as_before() -> None:
    rng.seed_everything("test", 0)


@pytest.mark.parametrize("draws_before", [0, 1, 2], ids=["fresh", "a Gaussian number in hand", "none in hand"])
def test_generators_go_on_where_they_were_captured(draws_before: int) -> None:
    for _ in range(draws_before):
        draw()
    states = rng.capture(CPU)
    unbroken = [draw() for _ in range(3)]

    rng.restore(states, CPU)

    assert [draw() for _ in range(3)] == unbroken


def test_states_are_tensors_that_survive_a_copy_byte_by_byte() -> None:
    states = {name: _copy(state) for name, state in rng.capture(CPU).items()}
    expected = draw()

    rng.restore(states, CPU)

    assert draw() == expected


def _copy(state: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(state.numpy().tobytes()), dtype=state.dtype)


def test_seeds_follow_from_their_parts() -> None:
    draws = []
    for parts in [("rank", 1, 0), ("rank", 1, 0), ("rank", 1, 1), ("rank", 2, 0)]:
        rng.seed_everything(*parts)
        draws.append(draw())

    assert draws[0] == draws[1]
    assert len(set(draws)) == 3


def test_a_block_that_preserves_leaves_no_trace_even_when_it_fails() -> None:
    states = rng.capture(CPU)
    expected = draw()
    rng.restore(states, CPU)

    with pytest.raises(ZeroDivisionError), rng.preserve_states(CPU):
        _draw_and_fail()

    assert draw() == expected


def _draw_and_fail() -> None:
    draw()
    raise ZeroDivisionError


def test_host_generators_are_put_back() -> None:
    with rng.preserve_cpu_states():
        expected = draw()

    assert draw() == expected
