"""Host lists expand as Slurm means them."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cluster.slurm.hostlist import MAX_RANGE, compress_hostlist, expand_hostlist
from ddp_hpc.job.wire.subprocesses import ask_nodes
from tests.hostlist_expressions import expression, expressions


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        (" ", []),
        ("n1", ["n1"]),
        ("n1-3", ["n1-3"]),
        ("a,b,a", ["a", "b", "a"]),
        (",a,,b,", ["a", "b"]),
        ("n1, n2\tn3\nn4", ["n1", "n2", "n3", "n4"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[1]", ["n1"]),
        ("n[5-5]", ["n5"]),
        ("n[1-3,5]", ["n1", "n2", "n3", "n5"]),
        ("a,b[1-2]", ["a", "b1", "b2"]),
        ("b[1-2],a", ["b1", "b2", "a"]),
        ("b[1-2] a", ["b1", "b2", "a"]),
        ("[1-2]", ["1", "2"]),
        ("n[3,1,2,1]", ["n3", "n1", "n2", "n1"]),
        ("n[1-2],n[2-3]", ["n1", "n2", "n2", "n3"]),
        # A range is as wide as its lower end is written; a number alone as it is written.
        ("n[001-003]", ["n001", "n002", "n003"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[08-12]", ["n08", "n09", "n10", "n11", "n12"]),
        ("n[08,9,10]", ["n08", "n9", "n10"]),
        ("n[98-101]", ["n98", "n99", "n100", "n101"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[1-02]", ["n1", "n2"]),
        ("n[1,01]", ["n1", "n01"]),
        ("n[000]", ["n000"]),
        # The last bracket turns fastest; of those before it, the first.
        ("rack[1-2]n[3-4]", ["rack1n3", "rack1n4", "rack2n3", "rack2n4"]),
        ("n[1-2][3-4]", ["n13", "n14", "n23", "n24"]),
        ("a[1-2]b[1-2]c[1-2]", ["a1b1c1", "a1b1c2", "a2b1c1", "a2b1c2", "a1b2c1", "a1b2c2", "a2b2c1", "a2b2c2"]),
        # Newer versions of Slurm take a suffix.
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
        ("a,n[1-2]-ib,c", ["a", "n1-ib", "n2-ib", "c"]),
        ("n[1-2]-ib[3-4]x", ["n1-ib3x", "n1-ib4x", "n2-ib3x", "n2-ib4x"]),
        ("100%d[01-02]%s", ["100%d01%s", "100%d02%s"]),
    ],
)
def test_a_host_list_expands(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("n[3-1]", "'3-1'"),
        ("m,n[3-1],k", "'3-1'"),
        (f"n[0-{MAX_RANGE}]", f"{MAX_RANGE} hosts"),
        ("n[]", "''"),
        ("n[1,]", "''"),
        ("n[,1]", "''"),
        ("n[1,,2]", "''"),
        ("n[a-b]", "'a-b'"),
        ("n[-3]", "'-3'"),
        ("n[1--3]", "'1--3'"),
        ("n[0x1-0x3]", "'0x1-0x3'"),
        ("n[1-3:2]", "'1-3:2'"),
        ("n[1-2]m[3-1]", "'3-1'"),
        ("n[\u0661-\u0662]", "neither a number nor a range"),
        ("n[0-65535][0-65535]", "more than 262144 hosts"),
        (f"n{'[1,2]' * 50}", "more than 262144 hosts"),
        (f"n[{'0-65535,' * 50}1]", "more than 262144 hosts"),
        (f"n[{'9' * 5000}]", "neither a number nor a range"),
        # scontrol makes something up for these: a number of blanks, a name with a bracket.
        ("n[1-]", "'1-'"),
        ("n[1, 2]", "bracket"),
        ("n[", "bracket"),
        ("n[1-2", "bracket"),
        ("n1-2]", "bracket"),
        ("n[[1-2]]", "bracket"),
        ("n[1-2]]", "bracket"),
    ],
)
def test_what_is_no_host_list_is_refused_with_what_was_found(text: str, found: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        expand_hostlist(text)

    assert found in str(refusal.value)
    assert repr(text) in str(refusal.value)


def test_the_longest_range_is_taken() -> None:
    assert len(expand_hostlist(f"n[1-{MAX_RANGE}]")) == MAX_RANGE


@given(st.lists(expressions(), max_size=4))
def test_names_are_expanded_one_after_the_other(names: list[tuple[str, list[str]]]) -> None:
    text = ",".join(text for text, _ in names)

    hosts = expand_hostlist(text)

    assert hosts == [host for _, expanded in names for host in expanded]


def test_the_expressions_of_the_campaign_hold_what_is_hard() -> None:
    """10,000 plain names would prove little."""
    made = [expression(Random(seed))[0] for seed in range(200)]

    assert any(text.count("[") > 2 for text in made)
    assert any("[0" in text and "-" in text for text in made)
    assert any("," in text for text in made)


@given(st.lists(st.from_regex(r"\A[a-z]([a-z0-9-]{0,4}[0-9]{0,6}|[0-9]{1,3})\Z"), max_size=30))
def test_a_compressed_list_names_the_same_hosts(names: list[str]) -> None:
    assert sorted(expand_hostlist(compress_hostlist(names))) == sorted({*names})


def test_a_question_to_ten_thousand_nodes_fits_a_command_line(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\nexec echo asked >&2\n")
    srun.chmod(0o755)
    nodes = [f"gpu-{rack:03}-node{number:05}" for rack in range(10) for number in range(1000)]

    found = ask_nodes(["ask"], nodes, environ={"PATH": f"{tmp_path}:/bin"}, timeout_s=20.0)

    assert found.last_error == "asked"
