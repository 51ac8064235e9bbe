"""What follows where the supervisor itself fails."""

from __future__ import annotations

import shutil
import time

import pytest

from ddp_hpc.job.ending import attempt_end, last_resort, requeue_job
from ddp_hpc.run.run_dir import ownership
from ddp_hpc.run.spec import RestartSpec
from ddp_hpc.run.workload import recipe
from tests.made_run import add_checkpoint
from tests.unit.made_job import CRASHED, STOPPED, Make


def test_an_error_of_ours_amid_the_verdict_sends_the_job_back_all_the_same(
    supervised: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cause_of(evidence: object) -> None:
        raise KeyError("odd")

    monkeypatch.setattr(attempt_end, "cause_of", cause_of)
    one = supervised()

    conclusion = last_resort.conclude_in_any_case(one.context, one.begin(), CRASHED)
    last_resort.carry_out_in_any_case(one.context, conclusion)

    assert (one.last.cause, one.last.next) == ("unexplained", "requeue")
    assert one.last.reason == "ddp-hpc's own supervisor process failed: KeyError: 'odd' (traceback in the job's log)"
    assert one.slurm.orders("scontrol requeue") == ["scontrol requeue 7"]


def test_errors_of_ours_without_progress_end_the_run(supervised: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_end, "cause_of", lambda evidence: evidence.nothing)
    one = supervised(restart=RestartSpec(max_no_progress=2))

    found = [last_resort.conclude_in_any_case(one.context, one.begin(), CRASHED) for _ in range(2)]

    assert [each.end.next for each in found] == ["requeue", ""]
    assert "2 attempts in a row ended without a new checkpoint" in one.last.reason


def test_a_job_goes_back_into_the_queue_though_its_ledger_cannot_be_read_or_written(
    supervised: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = supervised()
    attempt = one.begin()
    one.run.attempts.unlink()
    one.run.attempts.mkdir()

    conclusion = last_resort.conclude_in_any_case(one.context, attempt, STOPPED)
    last_resort.carry_out_in_any_case(one.context, conclusion)

    assert "scontrol requeue 7" in one.slurm.orders("scontrol requeue")
    assert f"how attempt {attempt} ended" in capsys.readouterr().err


def test_the_newest_checkpoint_is_known_though_the_ledger_cannot_be_read(supervised: Make) -> None:
    one = supervised()
    attempt = one.begin()
    ownership.release_claim(one.run, attempt)
    add_checkpoint(one.run, 4)
    one.run.attempts.unlink()
    one.run.attempts.mkdir()

    conclusion = last_resort.conclude_in_any_case(one.context, attempt, CRASHED)

    assert conclusion.end.last_step == 4


def test_a_decision_with_fewer_facts_waits_no_second_time_for_checkpoints_that_cannot_be_listed(
    supervised: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recipe, "LISTING_PATIENCE_S", 0.6)
    one = supervised()
    attempt = one.begin()
    shutil.rmtree(one.run.checkpoints)
    for path in (one.run.checkpoints, one.run.progress):
        path.symlink_to(path.name)

    conclusion = last_resort.conclude_in_any_case(one.context, attempt, CRASHED)

    assert (conclusion.end.next, conclusion.end.last_step) == ("requeue", None)
    waits = [record for record in caplog.records if "Trying again" in record.getMessage()]
    assert len(waits) == 1


def test_a_job_that_goes_back_after_an_error_of_ours_is_left_no_sooner_than_any_other(
    supervised: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some versions of Slurm cannot start a job again in the second in which its supervisor ended (`requeue_job.STAY_AFTER_REQUEUE_S`)."""

    def fail(context: object, conclusion: object) -> None:
        raise KeyError("odd")

    one = supervised()
    conclusion = last_resort.conclude_in_any_case(one.context, one.begin(), STOPPED)
    monkeypatch.setattr(requeue_job, "carry_out_decision", fail)
    monkeypatch.setattr(requeue_job, "STAY_AFTER_REQUEUE_S", 0.3)
    began = time.monotonic()

    last_resort.carry_out_in_any_case(one.context, conclusion)

    assert one.slurm.orders("scontrol requeue") == ["scontrol requeue 7"]
    assert time.monotonic() - began >= 0.3
