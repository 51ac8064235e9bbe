"""From the flight records of all ranks: which one is behind, who calls something else, or that nobody is behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from ddp_hpc.cluster.rank_probe.compare_ranks import compare, main_thread_frames
from ddp_hpc.run.run_dir.failure_reports import HangKind
from ddp_hpc.run.run_dir.hang_records import RankInHang

WAITS = ("/v/torch/distributed/distributed_c10d.py:9 in all_reduce", "/home/u/train.py:12 in step")
LOADS = ("/v/torch/utils/data.py:3 in fetch", "/home/u/data.py:30 in load", "/home/u/train.py:11 in step")

OWN = ("/home/u/pipe.py:7 in step", "/home/u/train.py:11 in main")


def stacks(frames: Sequence[str]) -> str:
    lines = [
        f'  File "{where.rpartition(":")[0]}", line {where.rpartition(":")[2]} in {function}\n'
        for where, _, function in (frame.partition(" in ") for frame in frames)
    ]
    return f"Current thread 0x1 (most recent call first):\n  <no Python frame>\n\nThread 0x2 (most recent call first):\n{''.join(lines)}"


def launched(
    number: int, *, done: bool = True, op: str = "all_reduce", group: str = "0", **more: Any
) -> dict[str, Any]:
    """Return an entry as PyTorch 2.15 writes it."""
    return {
        "collective_seq_id": number,
        "input_dtypes": ["Float"],
        "input_sizes": [[4]],
        "is_p2p": False,
        "process_group": [group, "default_pg" if group == "0" else "undefined"],
        "profiling_name": f"gloo:{op}",
        "retired": done,
        "state": "scheduled",
        **more,
    }


def rank(number: int, *entries: Mapping[str, Any], frames: Sequence[str] = WAITS, **more: Any) -> RankInHang:
    fields: dict[str, Any] = {
        "answers": True,
        "stacks": stacks(frames),
        "flight_record": {"entries": list(entries), "pg_config": {"": {"ranks": "[0, 1]"}}},
        **more,
    }
    return RankInHang(rank=number, host="node1", at=1.0, **fields)


OPEN = launched(4, done=False)
BEFORE = launched(3)
OTHER_GROUP = launched(1, done=False, group="7")


@pytest.mark.parametrize(
    ("records", "kind", "ranks", "said"),
    [
        pytest.param([rank(0, BEFORE, OPEN), rank(1, BEFORE, frames=LOADS)], "behind", [1], "is in /home/u/data.py:30 in load: it has launched 3 collectives of group 0 (default_pg), and others wait in collective 4, all_reduce of 4 Float elements", id="loads"),
        pytest.param([rank(0, OPEN), rank(1, BEFORE, stacks=None)], "behind", [1], "holds Python's interpreter (GIL)", id="gil"),
        pytest.param([rank(0, OPEN), rank(1, flight_record=None, stacks=None, answers=False, state="stopped")], "behind", [1], "is stopped (SIGSTOP)", id="stopped"),
        pytest.param([rank(0, OPEN), rank(1, flight_record=None, stacks=None, answers=False, state="in the kernel (nfs_wait)")], "behind", [1], "waits in the kernel (nfs_wait), as for a file system", id="kernel"),
        pytest.param([rank(0, OPEN), rank(1, flight_record=None, stacks=None, answers=False)], "", [], "", id="a rank that is not known"),
        pytest.param([rank(0, OPEN)], "", [], "", id="a rank without a record"),
        pytest.param([rank(0, OPEN), rank(1, BEFORE, frames=LOADS), rank(2, BEFORE, frames=LOADS), rank(3, OPEN)], "behind", [1, 2], "(so does rank 2)", id="two behind"),
        pytest.param([rank(0, OPEN), rank(1, BEFORE, frames=OWN, line="req.wait()"), rank(2, BEFORE, frames=OWN, line="parse(text)")], "behind", [2], "pipe.py:7", id="one waits for the other in a call of C"),
        pytest.param([rank(0, OPEN), rank(1, BEFORE, frames=OWN), rank(2, BEFORE, frames=OWN)], "", [1, 2], "may wait for a rank themselves: rank 1 is in /home/u/pipe.py:7 in step; rank 2", id="two in lines that are not known"),
        pytest.param([rank(0, OPEN), rank(1, BEFORE, frames=OWN, line="print(loss.item())")], "", [1], "rank 1 is in /home/u/pipe.py:7", id="one that may wait for its GPU"),
        pytest.param([rank(0, OPEN), rank(1, BEFORE), rank(2, BEFORE, frames=OWN, state="running")], "behind", [2], "pipe.py:7", id="one receives, the other computes"),
        pytest.param([rank(0, OPEN), rank(1, BEFORE, frames=OWN)], "behind", [1], "pipe.py:7", id="one alone whose line is not known"),
        pytest.param([rank(0, OPEN), rank(1, launched(4, done=False, op="broadcast"))], "different", [0, 1], "rank 0 calls all_reduce of 4 Float elements at /home/u/train.py:12 in step, rank 1 calls broadcast of 4 Float elements", id="operation"),
        pytest.param([rank(0, OPEN), rank(1, launched(4, done=False, input_sizes=[[8]]))], "different", [0, 1], "rank 1 calls all_reduce of 8 Float elements", id="size"),
        pytest.param([rank(0, OPEN), rank(1, launched(4, done=False, input_dtypes=["Half"]))], "different", [0, 1], "of 4 Half elements", id="dtype"),
        pytest.param([rank(0, OPEN), rank(1, launched(4, done=False, input_sizes=[[2, 2]]))], "network", [0, 1], "no rank is behind: all have launched the same collectives, up to all_reduce (number 4 of group 0 (default_pg))", id="another shape of as many elements"),
        pytest.param([rank(0, launched(4, done=False, op="all_gather")), rank(1, launched(4, done=False, op="all_gather", input_sizes=[[9]]))], "network", [0, 1], "", id="uneven gather"),
        pytest.param([rank(0, OPEN), rank(1, OPEN)], "network", [0, 1], "does not end", id="nobody"),
        pytest.param([rank(0, OPEN), rank(1, launched(4), frames=LOADS)], "behind", [1], "is in /home/u/data.py:30", id="it has left what the others wait in"),
        pytest.param([rank(0, OPEN), rank(1, launched(4), launched(5, done=False))], "network", [0, 1], "", id="one has gone on to the next"),
        pytest.param([rank(0, OPEN), rank(1, BEFORE, OTHER_GROUP), rank(2, BEFORE, launched(0, group="7"), frames=LOADS)], "behind", [2], "data.py", id="a chain over two groups"),
        pytest.param([rank(0, BEFORE, launched(1, group="7"), OPEN), rank(1, BEFORE, launched(1, group="7"), launched(2, done=False, group="7"))], "different", [0, 1], "ranks wait for each other in different groups", id="groups in another order"),
        pytest.param([rank(0, BEFORE), rank(1, BEFORE)], "", [], "", id="no collective is open"),
        pytest.param([rank(0), rank(1)], "", [], "", id="no collective at all"),
        pytest.param([rank(0, {**OPEN, "is_p2p": True}), rank(1, BEFORE)], "", [], "", id="point to point"),
        pytest.param([rank(0, OPEN), rank(1, flight_record={"entries": "?"})], "", [], "", id="damaged"),
        pytest.param([rank(0, {"collective_seq_id": "?"}, OPEN), rank(1, OPEN, flight_record={"entries": [7, OPEN], "pg_config": 3})], "network", [0, 1], "", id="an entry is damaged"),
    ],
)  # fmt: skip
def test_records_say_who_hangs(records: Sequence[RankInHang], kind: HangKind, ranks: Sequence[int], said: str) -> None:
    world_size = 1 + max(1, *(record.rank for record in records))

    found = compare(records, world_size)

    assert (found.kind, list(found.ranks)) == (kind, ranks)
    assert said in found.how


def test_a_group_whose_ranks_are_listed_counts_a_rank_that_has_not_used_it() -> None:
    config = {"7": {"desc": "tp", "ranks": "[0, 2]"}}

    def with_config(record: RankInHang) -> RankInHang:
        return RankInHang(**{**vars(record), "flight_record": {**(record.flight_record or {}), "pg_config": config}})

    records = [
        with_config(rank(0, OTHER_GROUP)),
        with_config(rank(1, BEFORE)),
        with_config(rank(2, BEFORE, frames=LOADS)),
    ]

    assert (compare(records, 3).kind, compare(records, 3).ranks) == ("behind", [2])


def test_a_run_of_one_rank_waits_for_nobody() -> None:
    assert compare([rank(0, OPEN)], 1).kind == ""
    assert main_thread_frames("") == []
