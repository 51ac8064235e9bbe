"""What follows where the supervisor itself fails."""

from __future__ import annotations

import pytest

from ddp_hpc.job.ending import attempt_end, last_resort
from ddp_hpc.spec import RestartSpec
from tests.unit.made_job import CRASHED, STOPPED, Make


def test_an_error_of_ours_amid_the_verdict_sends_the_job_back_all_the_same(
    supervised: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cause_of(evidence: object) -> None:
        raise KeyError("odd")

    monkeypatch.setattr(attempt_end, "cause_of", cause_of)
    one = supervised()

    conclusion = last_resort.conclude(one.context, one.begin(), CRASHED)
    last_resort.leave(one.context, conclusion)

    assert (one.last.cause, one.last.next) == ("unexplained", "requeue")
    assert one.last.reason == "ddp-hpc's own supervisor process failed: KeyError: 'odd'"
    assert one.slurm.orders("scontrol requeue") == ["scontrol requeue 7"]


def test_errors_of_ours_without_progress_end_the_run(supervised: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_end, "cause_of", lambda evidence: evidence.nothing)
    one = supervised(restart=RestartSpec(max_no_progress=2))

    found = [last_resort.conclude(one.context, one.begin(), CRASHED) for _ in range(2)]

    assert [each.decision.next for each in found] == ["requeue", ""]
    assert "2 attempts in a row ended without a new checkpoint" in one.last.reason


def test_a_job_goes_back_into_the_queue_though_its_ledger_cannot_be_read_or_written(
    supervised: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = supervised()
    attempt = one.begin()
    one.run.attempts.unlink()
    one.run.attempts.mkdir()

    conclusion = last_resort.conclude(one.context, attempt, STOPPED)
    last_resort.leave(one.context, conclusion)

    assert "scontrol requeue 7" in one.slurm.orders("scontrol requeue")
    assert f"could not write to attempts.jsonl how attempt {attempt} ended" in capsys.readouterr().err
