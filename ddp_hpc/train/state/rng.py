"""Seeds, saves and restores the random generators, which are part of the training state."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import numpy as np
import numpy.random  # numpy imports it late: then each forked worker would do so itself
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddp_hpc.train.data.sample_order import derive_seed


def seed_everything(*parts: int | str) -> None:
    """Seed torch (all devices), numpy and Python from `parts`."""
    seed = derive_seed(*parts)
    torch.manual_seed(seed)
    seed_host_libraries(seed)


def seed_host_libraries(seed: int) -> None:
    """Seed Python's and numpy's global generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  data sets use the global generator


def capture(device: torch.device) -> dict[str, Tensor]:
    """Return the state of every generator of this process, by name, as CPU tensors."""
    version, words, gauss = random.getstate()
    of_numpy = cast("tuple[str, NDArray[np.uint32], int, int, float]", np.random.get_state())  # noqa: NPY002
    _, keys, position, has_gauss, other_gauss = of_numpy
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words, gauss is not None, _bits(gauss or 0.0)], dtype=torch.int64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss, _bits(other_gauss)], dtype=torch.int64),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore(states: dict[str, Tensor], device: torch.device) -> None:
    """Restore what `capture` returned."""
    torch.set_rng_state(states["torch"])
    version, *words, has_gauss, bits = states["python"].tolist()
    random.setstate((version, tuple(words), _float_from_bits(bits) if has_gauss else None))
    *words, position, has_gauss, bits = states["numpy"].tolist()
    keys = np.array(words, dtype=np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, _float_from_bits(bits)))  # noqa: NPY002
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


@contextmanager
def preserve_states(device: torch.device) -> Iterator[None]:
    """Restore every generator afterwards."""
    states = capture(device)
    try:
        yield
    finally:
        restore(states, device)


@contextmanager
def preserve_cpu_states() -> Iterator[None]:
    """Restore the CPU generators afterwards; faster than `preserve_states`, which converts to tensors, as it runs for every micro batch."""
    of_torch, of_python, of_numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


def _bits(value: float) -> int:
    return int(np.float64(value).view(np.int64))


def _float_from_bits(bits: int) -> float:
    return float(np.int64(bits).view(np.float64))
