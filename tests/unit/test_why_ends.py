"""Ranks that left no report, of which `srun` or `torchrun` prints that a signal ended them."""

from __future__ import annotations

import pytest

from ddp_hpc.why.verdict import Facts, verdict_of
from tests.unit.test_why_verdict import facts, reset

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


def after(console: str, *reported: int) -> Facts:
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
def test_a_rank_that_a_signal_ended_is_named_from_the_jobs_log(made: Facts, failure: str, rank: int | None) -> None:
    found = verdict_of(made)

    assert (found.failure, found.rank) == (failure, rank)
    assert failure in {"unknown", "peer-gone"} or found.basis == "log"
