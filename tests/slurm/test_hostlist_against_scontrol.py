"""Host lists expand as `scontrol show hostnames` expands them; nothing but scontrol is needed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cluster.slurm.hostlist import expand_hostlist
from tests.hostlist_expressions import expression

NUM_EXPRESSIONS = 10_000
BATCH = 50
NUM_SINGLE = 300

Scontrol = Callable[[str], "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def scontrol(tmp_path_factory: pytest.TempPathFactory) -> Scontrol:
    """Return `scontrol show hostnames`, which wants a configuration, though no cluster."""
    command = shutil.which("scontrol")
    if command is None:
        pytest.skip("there is no `scontrol` on PATH (Debian: slurm-client)")
    conf = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    conf.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=n0\nPartitionName=p Nodes=n0\n", encoding="utf-8")
    environ = {"PATH": str(Path(command).parent), "SLURM_CONF": str(conf)}

    def show(text: str) -> subprocess.CompletedProcess[str]:
        argv = [command, "show", "hostnames", "--", text]
        return subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)

    return show


@pytest.fixture(scope="module")
def takes_suffixes(scontrol: Scontrol) -> bool:
    """Return whether this version takes `n[1-2]-ib`, as 24.11 does and 22.05 does not."""
    return scontrol("n[1-2]-ib").stdout.split() == ["n1-ib", "n2-ib"]


def made_up(seed: int, *, may_have_suffix: bool) -> list[str]:
    """Return expressions of one name each."""
    random = Random(seed)
    return [expression(random, may_have_suffix=may_have_suffix)[0] for _ in range(NUM_EXPRESSIONS)]


@pytest.mark.long
def test_ten_thousand_expressions_in_lists(scontrol: Scontrol, takes_suffixes: bool) -> None:
    texts = made_up(1, may_have_suffix=takes_suffixes)
    lists = [",".join(texts[start : start + BATCH]) for start in range(0, len(texts), BATCH)]

    different = [text for text in lists if scontrol(text).stdout.splitlines() != expand_hostlist(text)]

    assert different == []


@pytest.mark.long
def test_some_hundred_expressions_one_by_one(scontrol: Scontrol, takes_suffixes: bool) -> None:
    texts = made_up(2, may_have_suffix=takes_suffixes)[:NUM_SINGLE]

    different = [text for text in texts if scontrol(text).stdout.splitlines() != expand_hostlist(text)]

    assert different == []


@pytest.mark.parametrize("text", ["", " ", ",a,,b,", "n1 n2\tn3\nn4", "n1, n2", "n[1-65536]", "n1-3", "a,b[1-2],a"])
def test_edges_expand_alike(scontrol: Scontrol, text: str) -> None:
    assert scontrol(text).stdout.split() == expand_hostlist(text)


@pytest.mark.parametrize(
    "text", ["n[3-1]", "n[]", "n[1,]", "n[,1]", "n[a-b]", "n[-3]", "n[1--3]", "n[1-3:2]", "n[0-65536]", "m,n[3-1],k"]
)
def test_what_scontrol_refuses_is_refused(scontrol: Scontrol, text: str) -> None:
    said = scontrol(text)

    assert said.stdout == ""
    assert "Invalid hostlist" in said.stderr
    with pytest.raises(ConfigError):
        expand_hostlist(text)
