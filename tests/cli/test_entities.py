"""What each command says of a run that the same sample has ended twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_hpc.cli import main
from ddp_hpc.cli.summary import print_summary
from ddp_hpc.run.requeue import DecisionInputs, decide_next
from ddp_hpc.run.run_dir.ledger import Cause, End, Ending, Next, RootFailure, record_end, record_start
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import RestartSpec
from ddp_hpc.watch.status import read_status
from tests.made_run import add_failure, make_run

POISONED = RootFailure(fingerprint="0a1b2c3d4e5f", entity="train_data[17]", may_recover=False, failed_step=5)
WHY = decide_next(DecisionInputs(cause=Cause.WORKER_CRASHED, fails_again=POISONED.entity), RestartSpec()).why


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "runs")
    for attempt, next_ in enumerate((Next.IN_PLACE, Next.NOTHING)):
        record_start(run, attempt=attempt, job_id="7")
        why = "" if next_ else WHY
        end = End(
            ending=Ending.FAILED,
            exit_code=1,
            reason=f"rank 0: bad; {why}",
            cause=Cause.WORKER_CRASHED,
            next=next_,
            root=POISONED,
            why_last=why,
        )
        record_end(run, attempt, end)
        add_failure(
            run, attempt, exception="SampleError: `train_data[17]` raised ValueError: bad", exception_type="SampleError"
        )
    return run


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("status", "digits"), ["concerns    train_data[17]", WHY]),
        (("status", "digits", "--json"), ['"entity": "train_data[17]"', '"fingerprint": "0a1b2c3d4e5f"', WHY]),
        (("list",), [f"digits: {WHY}"]),
        (("why", "digits"), ["concerns  train_data[17]", "alike     attempt 0 failed in the same way", "without progress"]),
        (("why", "digits", "--json"), ['"entity": "train_data[17]"', '"fingerprint": "0a1b2c3d4e5f"']),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_command_names_the_sample_that_ended_a_run(
    run: RunDir, words: tuple[str, ...], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main(words)

    captured = capsys.readouterr()
    assert [text for text in said if text not in captured.out + captured.err] == []


def test_the_summary_at_the_end_of_follow_says_why_no_attempt_follows(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    print_summary(run, read_status(run, now=0.0), word="digits", again="ddp-hpc submit")

    assert f"why the run ended: {WHY}" in capsys.readouterr().err
