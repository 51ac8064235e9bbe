"""Ranks that left no report, of which `srun` or `torchrun` prints that a signal ended them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_hpc.run.run_dir.failure_reports import RankEnd, read_rank_ends, write_rank_end
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.watch.why.findings import AttemptFacts
from ddp_hpc.watch.why.verdict import verdict_of
from tests.unit.test_why_verdict import OOM_KILL, facts, reset

NODES = ("node1", "node2")
SILENT_1 = dict.fromkeys(range(4), "")
ENDING = "srun: launch/slurm: _step_signal: Terminating StepId=1.1\nslurmstepd-node1: error: *** STEP 1.1 ON node1 CANCELLED AT 2026-11-23T14:32:26 ***\n"
OTHER = "srun: error: node1: task 0: Exited with exit code 1\n"
TORCHRUN = """============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-23_14:35:11
  host      : node1.lab.local
  rank      : {other} (local_rank: 0)
  exitcode  : {other_code} (pid: 1767)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-23_14:35:11
  host      : node1.lab.local
  rank      : {rank} (local_rank: 1)
  exitcode  : {code} (pid: 1768)  (SIG)
  traceback : Signal received by PID 1768
============================================================
"""


def after(console: str, *reported: int) -> AttemptFacts:
    return facts(*(reset(rank) for rank in reported or (0, 2, 3)), logs=SILENT_1, console=console, nodes=NODES)


def torchrun(rank: int, code: int, other: int = 0, other_code: int = 1) -> str:
    return TORCHRUN.format(rank=rank, code=code, other=other, other_code=other_code)


@pytest.mark.parametrize(
    ("made", "failure", "rank"),
    [
        (after("srun: error: node1: task 1: Segmentation fault (core dumped)"), "native-crash", 1),
        (after(OTHER + ENDING + "srun: error: node1: task 1: Segmentation fault (core dumped)"), "native-crash", 1),
        (after("srun: error: node1: tasks 0-1: Aborted", 2, 3), "native-crash", 0),
        (after(OTHER + "srun: error: node1: task 1: Killed\n" + ENDING), "killed", 1),
        (after(torchrun(1, -11)), "native-crash", 1),
        (after("srun: error: node1: task 1: Out Of Memory\n" + ENDING), "host-memory", 1),
        (after(OOM_KILL.replace("slurmstepd", "slurmstepd-node2") + ENDING, 0, 1), "host-memory", None),
        (after(OOM_KILL.replace("1.0", "7.0") + ENDING, 0, 1), "peer-gone", None),
        (after(torchrun(1, -9)), "killed", 1),
        # Slurm, or torchrun, may have sent the signal because another task had failed
        (after(OTHER + ENDING + "srun: error: node1: task 1: Killed"), "unknown", 1),
        (after(torchrun(0, 1, other=1, other_code=-9)), "unknown", 1),
        (after(torchrun(1, -15)), "unknown", 1),
        # the task is of another node than the rank of this number: it is an agent, or torchrun
        (after("srun: error: node2: task 1: Segmentation fault"), "unknown", 1),
        # another rank left nothing at all, and may have been the first
        (after("srun: error: node1: task 1: Segmentation fault", 0, 2), "peer-gone", None),
    ],
)  # fmt: skip
def test_a_rank_that_a_signal_ended_is_named_from_the_jobs_log(
    made: AttemptFacts, failure: str, rank: int | None
) -> None:
    found = verdict_of(made)

    assert (found.failure, found.rank) == (failure, rank)
    assert failure in {"unknown", "peer-gone"} or found.basis == "log"


@pytest.mark.parametrize(
    ("code", "at", "failure"),
    [
        (-15, -1.0, "signal"),
        (-2, -1.0, "signal"),
        (1, -1.0, "exit-code"),
        (130, -1.0, "signal"),  # Python's own, of Ctrl-C that nothing catches
        (200, -1.0, "exit-code"),
        (-15, 0.1, "signal"),  # its agent was slow to notice
        (1, 5.0, "exit-code"),
        (143, 5.0, "unknown"),
        (-15, 5.0, "unknown"),  # after the others: a launcher ends them when one has failed
        (0, -1.0, "unknown"),
    ],
)
def test_the_one_rank_without_a_report_is_the_root_if_it_ended_before_the_others_lost_it(
    code: int, at: float, failure: str
) -> None:
    made = facts(reset(0), reset(2), logs={0: "", 1: "", 2: ""}, ends={1: RankEnd(code=code, at=at)})

    found = verdict_of(made)

    assert (found.failure, found.rank) == (failure, 1)


def test_two_ranks_without_a_report_are_no_root() -> None:
    ends = {rank: RankEnd(code=-15, at=-1.0) for rank in (1, 2)}

    found = verdict_of(facts(reset(0), logs={0: "", 1: "", 2: ""}, ends=ends))

    assert (found.failure, found.rank) == ("peer-gone", None)


def test_the_first_record_of_an_end_stays(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.attempt_logs(0).mkdir(parents=True)

    write_rank_end(run, 0, 1, -15)
    write_rank_end(run, 0, 1, 1)

    assert read_rank_ends(run, 0, [0, 1]).keys() == {1}
    assert read_rank_ends(run, 0, [1])[1].code == -15
