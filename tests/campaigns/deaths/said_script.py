"""Prints and raises on one rank what a text in `said.json` asks for, with the real types of PyTorch, while the others train."""

from __future__ import annotations

import builtins
import json
import os
import sys
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist


def type_of(name: str) -> type[BaseException]:
    """Return an exception's class; one that no installed module has is made."""
    module, _, last = name.rpartition(".")
    try:
        found = getattr(import_module(module) if module else builtins, last)
    except (ImportError, AttributeError):
        found = type(last, (RuntimeError,), {"__module__": module})
    if not isinstance(found, type) or not issubclass(found, BaseException):
        raise TypeError(f"{name} is no exception")
    return found


def end() -> None:
    """End as the text says."""
    said = json.loads(Path("said.json").read_text(encoding="utf-8"))
    sys.stderr.write(said["prints"])
    sys.stderr.flush()
    if said["raises"]:
        raise type_of(said["raises"])(said["message"])
    if said["signal"]:
        os.kill(os.getpid(), said["signal"])
    os._exit(said["code"])


dist.init_process_group("gloo")
values = torch.ones(4)
for step in range(8):
    dist.all_reduce(values)
    if step == 3 and dist.get_rank() == int(sys.argv[1]):
        end()
