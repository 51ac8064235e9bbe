"""What older versions of PyTorch cannot do, done otherwise."""

from __future__ import annotations

import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from ddp_hpc.train import process_group
from ddp_hpc.train.process_group import Group
from tests.distributed.processes import in_group


def _leave(group: Group, version: str) -> tuple[bool, bool]:
    """Return whether the group is left, and whether it is freed, as by this version."""
    del group
    torch.__version__ = TorchVersion(version)
    made = weakref.ref(dist.group.WORLD)

    process_group.leave_process_group()

    return not dist.is_initialized(), made() is None


@pytest.mark.long
@pytest.mark.parametrize(("version", "is_freed"), [("2.6.0+cu124", False), ("2.7.1", False), ("2.8.0", True)])
def test_a_group_is_freed_only_where_pytorch_lets_go_of_the_interpreter_meanwhile(
    version: str, *, is_freed: bool, tmp_path: Path
) -> None:
    found = in_group(2, partial(_leave, version=version), tmp_path)

    assert found == [(True, is_freed)] * 2
