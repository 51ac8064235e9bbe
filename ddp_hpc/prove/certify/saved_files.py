"""What a file of a script holds, value by value, so that two files can be compared. Free of torch; runs no code of the file."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, Literal

SAVED_SUFFIXES = frozenset(
    f".{name}"
    for name in "pt pth ckpt bin safetensors tar pkl npz npy state distcp h5 hdf5 msgpack".split()  # noqa: SIM905
)
"""Of files in which scripts save their state."""
DISTCP_SUFFIX = ".distcp"
"""Of files that count once another one is there: torch.distributed.checkpoint writes a directory's `.metadata` last."""
MOST_BYTES = 512 << 20
"""The largest file that is read."""
_RNG_SIZES = frozenset({16, 816, 5056})
"""Bytes of the states of PyTorch's generators: CUDA's, and the CPU's."""
_MOST_LINES = 200_000


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a file holds."""

    kind: Literal["values", "text", "bytes"]
    values: Mapping[str, str] = field(default_factory=dict)
    """Of a saved state: the path of each value in it -> its text, or a hash of a tensor's bytes."""
    lines: tuple[str, ...] = ()
    digest: str = ""
    """Of the bytes; empty where the file is too large to read."""
    num_bytes: int | None = None
    """Of such a file."""

    @property
    def has_optimizer(self) -> bool:
        """Whether an optimizer's state dict is in it."""
        return any("param_groups" in path for path in self.values)

    @property
    def has_rng(self) -> bool:
        """Whether the state of a random generator is in it."""
        return any(text.startswith("rng ") or "rng" in path.lower() for path, text in self.values.items())

    @property
    def has_lr_scheduler(self) -> bool:
        """Whether a learning rate scheduler's state dict is in it."""
        return any(path.rpartition(".")[2] == "last_epoch" for path in self.values)


def masked(name: str) -> str:
    """Return a file's name without what changes from save to save: `epoch_#.pt`."""
    return re.sub(r"[0-9]+", "#", name)


def masked_name(path: str) -> str:
    """Return the name that a file has in any directory, `masked`."""
    return masked(PurePosixPath(path).name)


def is_saved_state(path: Path, pattern: str | None = None) -> bool:
    """Tell by its name whether a file holds a saved state; by the user's own pattern, where there is one."""
    if pattern is None:
        return path.suffix in SAVED_SUFFIXES
    shape = os.path.normpath(pattern).replace("**/", "*")  # whose `*` stands for directories, too
    return fnmatch(str(path), shape) or fnmatch(str(path), f"{shape}/*")


def is_committed(path: Path) -> bool:
    """Tell whether a reader takes a whole file for part of a state."""
    return path.suffix != DISTCP_SUFFIX or path.with_name(".metadata").exists()


def is_half_written(path: Path) -> bool:
    """Tell whether a saved state ends before its end; False where the format does not say."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
    except FileNotFoundError:
        return False
    if not size:
        return True
    try:
        if start.startswith(b"PK"):
            zipfile.ZipFile(path).close()
        elif path.suffix == ".safetensors":
            header, begin = _safetensors_header(path)
            return begin + max((end for *_, end in header.values()), default=0) > size
    except (zipfile.BadZipFile, ValueError, OSError):
        return True
    return path.suffix in {".pt", ".pth", ".ckpt"} and not start.strip(b"\0")


def read_in_copy(root: Path, path: Path) -> Contents:
    """Return what a file holds, with `.` for the copy that it lies in: two runs that save their own paths save the same."""
    found, here = read(path), str(root)
    values = {name.replace(here, "."): text.replace(here, ".") for name, text in found.values.items()}
    return replace(found, values=values, lines=tuple(line.replace(here, ".") for line in found.lines))


def read(path: Path) -> Contents:
    """Return what a file holds; the hash of its bytes where the format is not known."""
    if path.stat().st_size > MOST_BYTES:
        return Contents(kind="bytes", num_bytes=path.stat().st_size)
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    try:
        # `.distcp` is many archives in one file, of which a reader of archives sees the last.
        if data.startswith(b"PK") and path.suffix != ".distcp":
            return Contents(kind="values", values=dict(_of_zip(data)), digest=digest)
        if path.suffix == ".safetensors":
            header, begin = _safetensors_header(path)
            values = {
                name: f"tensor {kind} {_hash(data[begin + first : begin + end])}"
                for name, (kind, first, end) in header.items()
            }
            return Contents(kind="values", values=values, digest=digest)
    except Exception:  # noqa: BLE001  a file of another format than its name says: any error of a parser
        return Contents(kind="bytes", digest=digest)
    if b"\0" not in data[:4096]:
        lines = data.decode("utf-8", errors="replace").splitlines()
        if len(lines) <= _MOST_LINES:
            return Contents(kind="text", lines=tuple(lines), digest=digest)
    return Contents(kind="bytes", digest=digest)


def _safetensors_header(path: Path) -> tuple[dict[str, tuple[str, int, int]], int]:
    """Return each tensor's type and shape, its first byte and the one after its last; and where these are counted from."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length < MOST_BYTES else b""
    if len(text) < length or not length:
        raise ValueError(path)
    header = {name: one for name, one in json.loads(text).items() if name != "__metadata__"}
    return {
        name: (f"{one['dtype']} {list(one['shape'])}", int(one["data_offsets"][0]), int(one["data_offsets"][1]))
        for name, one in header.items()
    }, 8 + length


def _of_zip(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield the values of a file of `torch.save`, or the members of another archive."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = archive.namelist()
        pickled = next((name for name in names if name.endswith("/data.pkl") or name == "data.pkl"), None)
        if pickled is None:
            yield from ((name, _hash(archive.read(name))) for name in names)
            return
        folder = pickled[: -len("data.pkl")]
        tree = _Unpickler(io.BytesIO(archive.read(pickled)), lambda key: archive.read(f"{folder}data/{key}")).load()
        yield from _leaves("", tree)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield each value below `value` with its path: `optimizer.param_groups.0.lr`."""
    if isinstance(value, _Tensor):
        yield path, str(value)
        return
    if not isinstance(value, Mapping | list | tuple):
        yield path, repr(value)
        return
    for number, (key, item) in enumerate(value.items() if isinstance(value, Mapping) else enumerate(value)):
        name = f"tensor {number}" if isinstance(key, _Tensor) else str(key)  # its bytes change, its place does not
        yield from _leaves(f"{path}.{name}" if path else name, item)


class _Tensor(str):
    """Stands for a tensor: its type, its shape, its place in the storage, and a hash of the storage's bytes."""

    __slots__ = ()
    # It may be a key, as in the state of an optimizer that is pickled whole, where two parameters may have equal bytes.
    __eq__ = object.__eq__
    __hash__ = object.__hash__


class _ObjectStandIn(dict[Any, Any]):
    """Stands for an object of any class: its arguments, its state and its items, and none of its code."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _ObjectStandIn:  # noqa: PYI034  stubs are made by name
        new = super().__new__(cls)
        new.update({"__class__": cls.__name__, **{f"__{number}__": one for number, one in enumerate(args)}, **kwargs})
        return new

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take everything: `__new__` has kept it."""

    def __setstate__(self, state: Any) -> None:
        self["__state__"] = state

    def append(self, value: Any) -> None:
        """Keep an item of a list; without an `extend`, pickle adds all of them so."""
        self[f"__item {len(self)}__"] = value

    def __hash__(self) -> int:  # type: ignore[override]  # it may be a key
        return id(self)

    def __repr__(self) -> str:
        return type(self).__name__


def _rebuild_tensor(storage: tuple[str, str], offset: int, size: Any, stride: Any, *_: Any) -> _Tensor:
    (kind, content), shape = storage, [*size]
    is_rng = kind == "ByteStorage" and len(shape) == 1 and shape[0] in _RNG_SIZES
    return _Tensor(
        f"{'rng' if is_rng else 'tensor'} {kind} {shape} {(offset, tuple(stride))} {content.rpartition(' ')[2]}"
    )


_KNOWN: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
    ("builtins", "set"): set,
    ("builtins", "dict"): dict,
    ("builtins", "list"): list,
}


class _Unpickler(pickle.Unpickler):
    """Builds what a file of `torch.save` holds out of stand-ins, so that no code that the file names is run."""

    def __init__(self, file: io.BytesIO, read_storage: Callable[[str], bytes]) -> None:
        super().__init__(file)
        self._digest = functools.cache(lambda key: _hash(read_storage(key)))

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        return _KNOWN.get((module_name, global_name)) or type(f"{module_name}.{global_name}", (_ObjectStandIn,), {})

    def persistent_load(self, pid: Any) -> tuple[str, str]:
        """Return a storage's type (`FloatStorage`), and a hash of its bytes as a tensor's content."""
        _, kind, key, *_ = pid
        return str(getattr(kind, "__name__", kind)).rpartition(".")[2], f"tensor {self._digest(str(key))}"


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
