"""How the nodes of a job step answer through srun's output."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_hpc.cluster.slurm.framing import framed, read_answers

MARK = "0123456789abcdef"
LONG = {"interfaces": [{"name": f"eth{number}", "text": str(number**40)} for number in range(60)]}


def cut(text: str) -> str:
    """Return the text as srun passes it on: in lines of at most 1,024 bytes."""
    return "".join(f"{line[at : at + 1024]}\n" for line in text.splitlines() for at in range(0, len(line) or 1, 1024))


@given(st.recursive(st.none() | st.integers() | st.text(), lambda one: st.lists(one) | st.dictionaries(st.text(), one)))
def test_what_is_framed_is_read_again(answer: Any) -> None:
    assert read_answers(framed(answer, node="node1", mark=MARK), MARK) == {"node1": answer}


def test_a_long_answer_comes_through_lines_that_srun_cuts() -> None:
    printed = framed(LONG, node="node1.example.org", mark=MARK)

    assert printed.count("\n") > 3
    assert read_answers(cut(printed), MARK) == {"node1.example.org": LONG}


def test_lines_of_nodes_and_of_strangers_may_mix() -> None:
    lines = [line for node in ("n1", "n2") for line in framed(LONG, node=node, mark=MARK).splitlines()]
    mixed = [f"Welcome! {line} bye" for line in reversed(lines)]

    assert read_answers("\n".join(["{not json", *mixed, "\ufffd"]), MARK) == {"n1": LONG, "n2": LONG}


@pytest.mark.parametrize(
    "break_it",
    [
        lambda text: text.replace(" 1/", " 7/", 1),
        lambda text: "\n".join(line for line in text.splitlines() if " 1/" not in line),
        lambda text: text.replace(MARK, "fedcba9876543210"),
        lambda text: text[:-5],
    ],
    ids=["wrong number", "a line lost", "another's mark", "cut"],
)
def test_an_answer_that_is_not_whole_is_none(break_it: Any) -> None:
    printed = break_it(framed(LONG, node="n1", mark=MARK)) + framed("short", node="n2", mark=MARK)

    assert read_answers(printed, MARK) == {"n2": "short"}
