"""Writes a run's numbers by Weights & Biases' package: offline, into the run's directory, unless the user says otherwise.

Each attempt that has something new writes a file of its own (`wandb/offline-run-TIME-ID/run-ID.wandb`), all under one id.
A number that is in the file of an earlier attempt is left out: W&B cannot rewind. Resumed steps are the same to the bit, unless
something was changed or went wrong; a warning names steps that are not.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import wandb
from wandb.proto.wandb_internal_pb2 import Record

from ddp_hpc.train.recording.recorders import Ending, MetricsRow, RecordedRun, SentNumbers

_HEADER = b":W&B\xe1\xbe\x00"
"""Mark, magic number and version of the only format that there has been."""
_BLOCK = 32768
_WHOLE, _LAST = 1, 4
"""Kinds of parts that end a record, as in LevelDB's log: https://github.com/google/leveldb/blob/main/doc/log_format.md."""
_FLUSH_S = 1.0
"""W&B writes its file so often; 15 s by default, which a killed run would lose."""


class WandB:
    """One run of W&B, which begins with the first new number."""

    def __init__(self, subject: RecordedRun) -> None:
        self._subject = subject
        self._folder = Path(subject.environ.get("WANDB_DIR") or subject.run.path)
        self._sent = SentNumbers()
        for path in sorted(self._folder.glob(f"wandb/*run-*-{subject.id}/run-{subject.id}.wandb")):
            self._sent.values |= parse_wandb_numbers(path.read_bytes(), str(path))
        self._run: wandb.Run | None = None

    def record(self, row: MetricsRow) -> None:
        """Add a row. W&B writes all numbers of a step together, once it gets those of a later step, or is closed."""
        new = {tag: value for tag, value in row.numbers.items() if self._sent.add_if_new(row.step, tag, value)}
        if new:
            self._run = self._run or self._begin()
            self._run.log(new, step=row.step)

    def flush(self) -> None:
        """Send nothing: W&B's own process writes what it has about once a second."""
        self._sent.warn_of_changes()

    def close(self, ending: Ending) -> None:
        if self._run is not None:
            self._run.finish(exit_code=1 if ending == "failed" else 0)
            wandb.teardown()  # ends W&B's own process

    def _begin(self) -> wandb.Run:
        environ, subject = self._subject.environ, self._subject
        # Without what it would find out by itself: the machine, the command line, git's addresses, printed text, packages.
        settings = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            silent=True,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
            x_transaction_log_flush_interval=_FLUSH_S,
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        return wandb.init(
            id=subject.id,
            resume="allow",
            mode=environ.get("WANDB_MODE") or "offline",
            dir=str(self._folder),
            name=subject.run.name,
            project=environ.get("WANDB_PROJECT") or "ddp_hpc",
            config=dict(subject.config),
            settings=settings,
        )


open_recorder = WandB


def parse_wandb_numbers(data: bytes, name: str) -> dict[tuple[int, str], float]:
    """Return by step and tag the numbers in one of W&B's files, as far as it was written."""
    if data and not data.startswith(_HEADER):
        raise ValueError(
            f"{name} is not in the format of W&B's files, so ddp-hpc does not know which steps W&B has. Move it away to have all "
            "steps written again, or install the version of `wandb` that wrote it."
        )
    known: dict[tuple[int, str], float] = {}
    for raw in _records(data):
        record = Record.FromString(raw)
        if record.WhichOneof("record_type") == "history":
            for item in record.history.item:
                value = json.loads(item.value_json)
                tag = item.key or ".".join(item.nested_key)
                known[record.history.step.num, tag] = float(value) if isinstance(value, (int, float)) else math.nan
    return known


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the records up to the first that was not written whole."""
    at, parts = len(_HEADER), b""
    while at + 7 <= len(data):
        if (left := _BLOCK - at % _BLOCK) < 7:  # too few for a part's head: the next part begins with the next block
            at += left
            continue
        checksum, size, kind = struct.unpack_from("<IHB", data, at)
        part = data[at + 7 : at + 7 + size]
        if len(part) < size or zlib.crc32(part, zlib.crc32(bytes([kind]))) != checksum:
            return
        at += 7 + size
        parts += part
        if kind in (_WHOLE, _LAST):
            yield parts
            parts = b""
