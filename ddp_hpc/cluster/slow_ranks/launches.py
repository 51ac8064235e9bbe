"""Reads from PyTorch's flight record when a rank has launched its collectives.

The flight record is a ring of a process's newest collectives, which PyTorch keeps by default for gloo and for NCCL
(https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html). Of gloo's entries, only the time of the launch can be
trusted: PyTorch never fills in when they started and ended.
"""

from __future__ import annotations

import msgspec

MOST_LAUNCHES = 1000
"""How many collectives of a rank are compared, the newest; enough for 20 steps of a model with 50 buckets."""

MESSAGES = "messages"
"""A name in the place of a process group's: a rank's point-to-point messages, in the order in which it has launched them."""
_FOR_ALL = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "all_to_all", "alltoall", "barrier")
_TO_ONE = ("gather", "reduce", "send", "recv")


class Launches(msgspec.Struct, frozen=True, array_like=True):
    """The newest collectives of one rank in one process group, oldest first; plain lists, as they are written to a file."""

    group: str
    """PyTorch's name, which is the same on all ranks of the group: see `torch.distributed.new_group`."""
    seqs: list[int]
    """The number of each collective within its group; a collective has the same number on all ranks."""
    kinds: list[int]
    """What each one is: an index into `Summary.kinds`."""
    at_us: list[int]
    """When this rank launched each of them, in microseconds since the epoch, by this node's clock."""


class _Entry(msgspec.Struct):
    collective_seq_id: int
    time_created_ns: int
    profiling_name: str
    process_group: list[str]
    is_p2p: bool = False
    input_sizes: list[list[int]] = []
    input_dtypes: list[str] = []


_RECORD_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRIES_DECODER = msgspec.json.Decoder(list[_Entry])


def read_launches(record: bytes) -> tuple[list[str], list[Launches]]:
    """Return the kinds of collectives in a flight record (JSON), and the launches in each process group.

    Point-to-point messages have no number that all ranks know; they come as a group of their own, `MESSAGES`.

    Raises:
        ValueError: if it is not a flight record.
    """
    try:
        listed = _ENTRIES_DECODER.decode(_RECORD_DECODER.decode(record).get("entries", b"[]"))
    except msgspec.DecodeError as error:
        raise ValueError(f"This is not a flight record as JSON: {error}") from error
    entries = sorted((one for one in listed if one.time_created_ns > 0), key=lambda one: one.time_created_ns)
    numbers: dict[str, int] = {}
    found: dict[str, Launches] = {}
    for one in entries[-MOST_LAUNCHES:]:
        group = MESSAGES if one.is_p2p else one.process_group[0] if one.process_group else ""
        launches = found.setdefault(group, Launches(group, [], [], []))
        number, kind = len(launches.seqs) + 1, "send/recv"
        if not one.is_p2p:
            if launches.seqs and one.collective_seq_id <= launches.seqs[-1]:
                continue  # a coalesced collective has several entries with one number
            sizes = ",".join("x".join(map(str, size)) for size in one.input_sizes)
            number, kind = one.collective_seq_id, f"{one.profiling_name} {sizes} {','.join(one.input_dtypes)}"
        launches.seqs.append(number)
        launches.kinds.append(numbers.setdefault(kind, len(numbers)))
        launches.at_us.append(one.time_created_ns // 1000)
    return list(numbers), [launches for launches in found.values() if launches.seqs]


def waits_for_all(kind: str) -> bool:
    """Tell whether a collective of this kind keeps every rank, in its host, until all have launched it.

    Of NCCL's this is not known: a host goes on while its GPU waits, and the record has the time of the host.
    """
    backend, _, name = kind.split(" ", maxsplit=1)[0].lower().rpartition(":")
    return backend in ("", "gloo") and name.lstrip("_").startswith(_FOR_ALL)


def is_to_one(kind: str) -> bool:
    """Tell whether in a collective or a message of this kind a single rank waits for others."""
    name = kind.split(" ", maxsplit=1)[0].lower().rpartition(":")[2].lstrip("_")
    return name.startswith(_TO_ONE) and not name.startswith(_FOR_ALL)
