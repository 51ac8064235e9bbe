"""When two failures of the same sample end a run, case by case."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddp_hpc.job.ending.blame import root_failure
from ddp_hpc.run.requeue import DecisionInputs, decide_next, num_alike, repeated_sample
from ddp_hpc.run.run_dir.failure_reports import WorkerFailure
from ddp_hpc.run.run_dir.ledger import Attempt, Cause, Ending, Next, RootFailure
from ddp_hpc.run.spec import RestartSpec
from tests.made_run import made_attempt

CONTENT = "3 bytes, sha256 1"
POISONED = RootFailure(
    fingerprint="f1", entity="train_data[17]", entity_version=CONTENT, may_recover=False, failed_step=5
)
OF_SCRIPT = replace(POISONED, failed_step=None)


def attempt(number: int, root: RootFailure | None = None, **more: Any) -> Attempt:
    known: dict[str, Any] = {"cause": Cause.WORKER_CRASHED, "last_step": 4, "first_step": 0, **more}
    if root is not None:
        known["root"] = root
    return made_attempt(number, **known)


NEWEST = attempt(1, first_step=4, cause=None, last_step=None)


@pytest.mark.parametrize("root", [POISONED, replace(POISONED, failed_step=4)])
def test_the_same_proved_failure_twice_without_progress_is_named(root: RootFailure) -> None:
    assert repeated_sample([attempt(0, POISONED), NEWEST], root, 4) == root.entity


@pytest.mark.parametrize(
    ("why", "before", "newest", "root", "step"),
    [
        ("another fingerprint", attempt(0, replace(POISONED, fingerprint="f9")), NEWEST, POISONED, 4),
        ("another sample", attempt(0, replace(POISONED, entity="train_data[18]")), NEWEST, POISONED, 4),
        ("another content", attempt(0, replace(POISONED, entity_version="4 bytes, sha256 2")), NEWEST, POISONED, 4),
        ("content not known", attempt(0, replace(POISONED, entity_version="")), NEWEST, replace(POISONED, entity_version=""), 4),
        ("a script: neither its steps nor its order are known", attempt(0, OF_SCRIPT), NEWEST, OF_SCRIPT, 4),
        ("no entity", attempt(0, replace(POISONED, entity="")), NEWEST, replace(POISONED, entity=""), 4),
        ("no fingerprint", attempt(0, replace(POISONED, fingerprint="")), NEWEST, replace(POISONED, fingerprint=""), 4),
        ("the first might recover", attempt(0, replace(POISONED, may_recover=True)), NEWEST, POISONED, 4),
        ("the second may recover", attempt(0, POISONED), NEWEST, replace(POISONED, may_recover=True), 4),
        ("both may recover", attempt(0, replace(POISONED, may_recover=True)), NEWEST, replace(POISONED, may_recover=True), 4),
        ("a checkpoint between", attempt(0, POISONED), NEWEST, POISONED, 6),
        ("fewer checkpoints than before", attempt(0, POISONED), NEWEST, POISONED, 2),
        ("begun elsewhere", attempt(0, POISONED), replace(NEWEST, first_step=2), POISONED, 4),
        ("progress was not recorded", attempt(0, POISONED, last_step=None), NEWEST, POISONED, 4),
        ("a later step", attempt(0, POISONED), NEWEST, replace(POISONED, failed_step=6), 4),
        ("a step is not known", attempt(0, POISONED), NEWEST, replace(POISONED, failed_step=None), 4),
        ("the first was a hang", attempt(0, POISONED, cause=Cause.HANG), NEWEST, POISONED, 4),
        ("an attempt between is lost", attempt(0, POISONED), replace(NEWEST, attempt=2), POISONED, 4),
        ("a ledger without the keys", attempt(0), NEWEST, POISONED, 4),
    ],
)  # fmt: skip
def test_nothing_is_named_where_one_point_differs_or_is_not_known(
    why: str, before: Attempt, newest: Attempt, root: RootFailure, step: int
) -> None:
    assert repeated_sample([before, newest], root, step) == "", why


def test_the_first_attempt_of_a_submission_has_nothing_before_it() -> None:
    assert repeated_sample([NEWEST], POISONED, 4) == repeated_sample([], POISONED, 4) == ""


@pytest.mark.parametrize("cause", list(Cause))
def test_a_failure_that_is_named_ends_the_run_only_where_workers_crashed(cause: Cause) -> None:
    known = DecisionInputs(cause=cause, num_without_progress=2)
    policy = RestartSpec(max_no_progress=100)

    decision = decide_next(replace(known, fails_again="train_data[17]"), policy)

    if cause == Cause.WORKER_CRASHED:
        assert (decision.ending, decision.next) == (Ending.FAILED, Next.NOTHING)
        assert "`train_data[17]` ended two attempts in a row in the same way" in decision.why
    else:
        assert decision == decide_next(known, policy)


def test_a_job_that_slurm_has_requeued_goes_on_all_the_same() -> None:
    known = DecisionInputs(cause=Cause.WORKER_CRASHED, fails_again="train_data[17]", is_requeued_by_slurm=True)

    assert decide_next(known, RestartSpec()).next == Next.SLURM


# --- the root of several reports ---------------------------------------------------------------------------------------


def report(rank: int = 0, message: str = "label 99 is unknown", **more: Any) -> WorkerFailure:
    known: dict[str, Any] = {
        "rank": rank,
        "host": f"node{rank}",
        "at": 10.0 + rank,
        "step": 5,
        "exception": f"SampleError: `train_data[17]` raised ValueError: {message}",
        "exception_type": "SampleError",
        "log": "",
        "entity": "train_data[17]",
        "entity_version": CONTENT,
        "may_recover": False,
        "place": "data.py in __getitem__",
        **more,
    }
    return WorkerFailure(**known)


LOST: dict[str, Any] = {"exception": "RuntimeError: Connection closed by peer", "exception_type": "RuntimeError", "entity": "", "entity_version": "", "may_recover": True}  # fmt: skip


def root(*failures: WorkerFailure, cause: Cause = Cause.WORKER_CRASHED) -> RootFailure:
    ordered = sorted(failures, key=lambda failure: (failure.is_secondary, failure.at))
    return root_failure(cause, ordered, hosts=["node0", "node1", "node2"])


def test_the_fingerprint_does_not_depend_on_the_rank_the_node_the_time_or_numbers() -> None:
    here = root(report(0, "label 99 is unknown at 0x7f12 of /tmp/x1/y on node0", at=1.0))
    there = root(report(2, "label 98 is unknown at 0x8a34 of /tmp/x2/y on node2", at=2.0))

    assert here == there
    assert here.entity == "train_data[17]"


@pytest.mark.parametrize(
    "other",
    [
        report(1, "header is not known"),
        report(1, exception_type="OtherError"),
        report(1, place="other.py in __getitem__"),
    ],
)
def test_another_error_of_the_same_sample_is_another_fingerprint(other: WorkerFailure) -> None:
    assert root(other).fingerprint != root(report(0)).fingerprint


@pytest.mark.parametrize(
    "others",
    [
        [report(1, at=0.0, is_secondary=True, **LOST)],  # another clock
        [report(1, at=0.0)],  # the same sample: ranks that take parts of one
    ],
)
def test_what_follows_from_a_poisoned_sample_in_other_ranks_changes_nothing(others: list[WorkerFailure]) -> None:
    found = root(report(0), *others)

    assert (found.entity, found.may_recover, found.failed_step) == ("train_data[17]", False, 5)


STALE: dict[str, Any] = {"exception": "SampleError: `train_data[3]` raised OSError: [Errno 116] Stale file handle", "entity": "train_data[3]", "entity_version": "", "may_recover": True}  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [
        report(1, **STALE),
        report(1, at=99.0, **STALE),
        report(1, **(STALE | {"entity": "train_data[17]"})),  # the same sample: this rank's node says what is wrong
        report(1, at=0.0, **LOST),  # a text that is not known to be of a lost connection
        report(1, **(LOST | {"exception": "killed by SIGBUS", "signal": 7})),
        report(1, **(LOST | {"exception": "killed by SIGKILL", "signal": 9, "memory_ran_out": True})),
        report(-1, **LOST),  # an agent
    ],
)
def test_what_another_rank_reports_first_hand_of_an_outage_may_be_the_reason_of_all(other: WorkerFailure) -> None:
    found = root(report(0), other)

    assert (found.entity, found.may_recover) == ("train_data[17]", True)


def test_several_samples_that_fail_at_once_may_have_one_reason_that_recovers() -> None:
    found = root(report(0), report(1, entity="train_data[42]"))

    assert (found.entity, found.may_recover) == ("train_data[17]", True)


def test_a_report_without_an_entity_has_a_fingerprint_and_may_recover() -> None:
    found = root(report(0, **LOST))

    assert found.fingerprint
    assert (found.entity, found.may_recover) == ("", True)


@pytest.mark.parametrize("cause", [cause for cause in Cause if cause != Cause.WORKER_CRASHED])
def test_an_attempt_that_ended_otherwise_has_no_root(cause: Cause) -> None:
    assert root(report(0), cause=cause) == RootFailure()


def test_lost_connections_alone_have_no_root() -> None:
    assert root(report(0, is_secondary=True, **LOST)) == RootFailure()


def test_a_script_whose_step_is_not_known_has_none_in_the_ledger() -> None:
    assert root(report(0, of_script=True, step=0)).failed_step is None


def scripts_attempts(lives: list[tuple[int, float, str]]) -> list[Attempt]:
    """Return attempts that crashed, of each: how many saves it made, how long it lived, the fingerprint of its failure."""
    made, step, at = list[Attempt](), 0, 1000.0
    for number, (saves, lived_s, failure) in enumerate(lives):
        root = RootFailure(fingerprint=failure)
        made.append(
            attempt(number, root, first_step=step, last_step=step + saves, started_at=at, ended_at=at + lived_s)
        )
        step, at = step + saves, at + lived_s + 1.0
    return made


@pytest.mark.parametrize(
    ("why", "lives", "is_over"),
    [
        ("it starts over, and saves the same again", [(1, 8.4, "f"), (1, 6.3, "f"), (1, 4.8, "f"), (1, 9.6, "f")], True),
        ("the same in hours", [(3, 7300.0, "f"), (3, 7210.0, "f"), (3, 7260.0, "f"), (3, 7255.0, "f")], True),
        ("only its last failures are alike", [(5, 9.0, "g"), *[(1, 8.0, "f")] * 4], True),
        ("three may be chance", [(1, 8.0, "f")] * 3, False),
        ("another failure", [(1, 8.0, "f"), (1, 8.0, "f"), (1, 8.0, "g"), (1, 8.0, "f")], False),
        ("failures that nobody reported", [(1, 8.0, "")] * 6, False),
        ("a rare failure: other numbers of saves", [(2, 700.0, "f"), (9, 3000.0, "f"), (1, 420.0, "f"), (4, 1500.0, "f")], False),
        ("a rare failure: other times", [(1, 3700.0, "f"), (1, 700.0, "f"), (1, 4000.0, "f"), (1, 900.0, "f")], False),
    ],
)  # fmt: skip
def test_a_script_that_only_fails_anew_ends_although_its_files_change(
    why: str, lives: list[tuple[int, float, str]], is_over: bool
) -> None:
    ended = scripts_attempts(lives)
    newest = ended[-1]
    now = newest.ended_at or 0.0
    running = replace(newest, cause=None, root=RootFailure(), last_step=None, ended_at=None)

    num = num_alike([*ended[:-1], running], newest.root, newest.last_step or 0, now=now)
    decision = decide_next(DecisionInputs(cause=Cause.WORKER_CRASHED, num_alike=num), RestartSpec())

    assert (decision.next == Next.NOTHING) == is_over, why
    assert ("attempts in a row failed in the same way, each after as many saves" in decision.why) == is_over
