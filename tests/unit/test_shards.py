"""Headers of safetensors files, as other programs and accidents write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ddp_hpc.base.errors import CorruptCheckpointError
from ddp_hpc.run.checkpoints import shards
from ddp_hpc.run.checkpoints.checkpoint_store import read_safetensors
from ddp_hpc.train.state.training_state import DTYPE_NAMES


def a_file(table: Any, *, body: int = 8, length: int | None = None) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(body)


def an_entry(**changes: Any) -> dict[str, Any]:
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


GARBLED = {
    "empty": (b"", "has 0 bytes"),
    "a few bytes": (b"\x02\0\0", "has 3 bytes"),
    "random bytes": (bytes(range(200, 250)), "first 8 bytes say that its header ends at byte"),
    "a header beyond the end": (a_file(an_entry(), length=1 << 62), "first 8 bytes say that its header ends at byte"),
    "not JSON": (a_file(b"PK\x03\x04 is a zip file"), "header cannot be read"),
    "not UTF-8": (a_file(b'{"\xff": 1}'), "header cannot be read"),
    "a list": (a_file([1, 2]), "header cannot be read"),
    "nested without end": (a_file(b"[" * 200_000), "header cannot be read"),
    "an infinite size": (
        a_file(b'{"w": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 8]}}'),
        "cannot be read",
    ),
    "a fraction": (a_file(an_entry(data_offsets=[0, 7.5])), "header cannot be read"),
    "no offsets": (a_file({"w": {"dtype": "F32", "shape": [2]}}), "header cannot be read"),
    "a dtype that is a number": (a_file(an_entry(dtype=32)), "header cannot be read"),
    "an unknown dtype": (a_file(an_entry(dtype="F4")), "'w' of dtype 'F4', but ddp-hpc reads only F64"),
    "outside of the file": (a_file(an_entry(data_offsets=[0, 16], shape=[4])), "but its tensors are in bytes"),
    "before the file": (a_file(an_entry(data_offsets=[-8, 0])), "but its tensors are in bytes"),
    "sizes below zero": (a_file(an_entry(shape=[-1, -2])), r"gives 'w' the shape \[-1, -2\]"),
    "too few bytes": (a_file(an_entry(data_offsets=[0, 4])), r"'w' has 4 bytes, but F32 of shape \[2\] needs 8"),
}


@pytest.mark.parametrize("kind", GARBLED)
def test_a_file_that_is_not_safetensors_is_refused_by_its_name(kind: str, tmp_path: Path) -> None:
    content, message = GARBLED[kind]
    path = tmp_path / "weights.safetensors"
    path.write_bytes(content)

    with pytest.raises(CorruptCheckpointError, match=message) as error:
        read_safetensors(path)

    assert str(error.value).startswith(str(path))


def test_files_of_the_safetensors_library_are_read(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"w": torch.arange(6.0).view(2, 3), "none": torch.empty(0), "one": torch.tensor(3)}, path)

    found = read_safetensors(path)

    assert {name: (raw.dtype, raw.shape) for name, raw in found.items()} == {
        "w": ("F32", (2, 3)),
        "none": ("F32", (0,)),
        "one": ("I64", ()),
    }


def test_readers_with_and_without_torch_know_the_same_dtypes() -> None:
    assert {name: dtype.itemsize for dtype, name in DTYPE_NAMES.items()} == shards.ITEM_BYTES_BY_DTYPE
