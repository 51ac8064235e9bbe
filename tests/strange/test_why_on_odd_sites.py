"""What the jobs' logs of odd sites say of a rank that left no report: names with domains, arrays, tables that two nodes print at once."""

from __future__ import annotations

from itertools import chain, zip_longest

import pytest

from ddp_hpc.watch.why.verdict import verdict_of
from tests.unit.test_why_ends import NODES, SILENT_1, torchrun
from tests.unit.test_why_verdict import facts, report, reset

OOM = "slurmstepd: error: Detected 1 oom_kill event in StepId={0}. Some of the step tasks have been OOM Killed."


def test_tables_that_two_nodes_print_at_once_name_no_rank_by_the_signal_of_another() -> None:
    tables = torchrun(1, 1).splitlines(), torchrun(3, -11, other=2).replace("node1", "node2").splitlines()
    mixed = "\n".join(line for line in chain(*zip_longest(*tables)) if line is not None)

    found = verdict_of(facts(*map(reset, (0, 2, 3)), logs=SILENT_1, console=mixed, nodes=NODES))

    assert (found.failure, found.rank) == ("unknown", 1)


def test_a_node_that_slurm_names_with_its_domain_is_the_one_that_srun_names_without() -> None:
    nodes = ("node1.hpc.example", "node2.hpc.example")
    line = "srun: error: node1: task 1: Segmentation fault (core dumped)"

    found = verdict_of(facts(*map(reset, (0, 2, 3)), logs=SILENT_1, console=line, nodes=nodes))

    assert (found.failure, found.rank) == ("native-crash", 1)


@pytest.mark.parametrize(
    ("step", "failure"), [("4242.0", "host-memory"), ("12_3.0", "host-memory"), ("12_4.0", "killed")]
)
def test_a_task_of_an_array_is_named_by_either_of_its_numbers(step: str, failure: str) -> None:
    made = facts(report(1, signal=9), console=OOM.format(step), job_id="12_3")

    assert verdict_of(made).failure == failure
