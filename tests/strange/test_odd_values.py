"""A record of a run that is valid JSON with a wrong value, as a hand or another program leaves it: no command may fail on it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.base.record import write_record
from ddp_hpc.cli import main
from ddp_hpc.run.run_dir.failure_reports import write_rank_end
from ddp_hpc.run.run_dir.hang_records import RankInHang, write_hang_record
from ddp_hpc.run.run_dir.joined_ranks import write_missing, write_rendezvous
from ddp_hpc.run.run_dir.ledger import Cause, End, Ending, Next, RootFailure, record_end, record_start
from ddp_hpc.run.run_dir.network import LinkMetrics, NetworkFindings, PairFault, write_network
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.preflight import Finding, PreflightReport
from ddp_hpc.run.run_dir.records import (
    AwaitedRun,
    QueuedJob,
    ask_to_stop,
    write_awaited,
    write_queued_job,
    write_script_report,
)
from ddp_hpc.run.run_dir.timeline import Mark, RankComparison, SlowRankAlarm, as_line, record_alarms
from tests.made_run import add_failure, add_log, add_metrics, add_progress, make_run

ODD: Sequence[Any] = (None, True, -1, 1.5, 10**400, "text", "", [], [1], {}, {"a": 1}, [[{}]], float("nan"))
COMMANDS = (["list"], ["status", "odd"], ["status", "odd", "--json"], ["why", "odd"], ["report", "odd", "-o", "-"])


def add_everything(run: RunDir) -> None:
    """Write one of each record that commands read of a run."""
    failure = RootFailure(fingerprint="ValueError", entity="train_data[17]")
    record_start(run, attempt=0, job_id="7", cluster="slurm", nodes=("node1", "node2"), ends_at=9e9, queued_at=1.0)
    end = End(
        ending=Ending.FAILED,
        exit_code=1,
        reason="it hung",
        cause=Cause.HANG,
        last_step=10,
        next=Next.IN_PLACE,
        failed_nodes=("node2",),
        root=failure,
    )
    record_end(run, 0, end)
    record_start(run, attempt=1, job_id="7", first_step=10)
    write_queued_job(run, QueuedJob(job_id="7", attempt=0, at=1.0, backend="local"))
    write_awaited(run, "7", [AwaitedRun(path=str(run.path), job_id="6")])
    add_progress(run, 1, metrics={"accuracy": 0.5}, save_bytes={"host": 1})
    add_metrics(
        run,
        [
            {"kind": "train", "step": 5, "at": 1.0, "loss": 0.5, "samples_per_s": 2.0},
            {"kind": "eval", "step": 5, "at": 2.0, "accuracy": 0.5},
        ],
    )
    marks = [Mark(kind="begin", attempt=0, at=1.0, step=0, world_size=2, num_gpus=1)]
    marks += [
        Mark(kind="phases", attempt=0, at=5.0, step=3, num_steps=3, phases={"data": 0.5}, interval={"steps": 3.0})
    ]
    run.timeline.write_bytes(b"".join(map(as_line, marks)))
    look = RankComparison(attempt=0, at=5.0, step=3, step_s=0.1, lost_s={0: 0.0, 1: 0.1})
    run.waits.write_bytes(as_line(look))
    numbers = {"lost_s": 0.1, "share": 0.5, "num_waiting": 1, "at": 3.0, "since_step": 2}
    record_alarms(run, [SlowRankAlarm(attempt=1, rank=1, node="node2", cause="a busy CPU", **numbers)])  # type: ignore[arg-type]
    add_failure(run, 0, signal=9)
    add_log(run, "Traceback (most recent call last):\nValueError: no\n")
    pair = PairFault(nodes=("node1", "node2"), fault="loss", loss=0.5)
    pace = LinkMetrics(sender="node1", receiver="node2", mb_per_s=1.0, ahead_s=0.0, trip_s=0.1)
    for attempt in (0, 1):
        write_rendezvous(run, attempt, "node1:29500", "the fastest network")
        write_missing(run, attempt, [1], workers_per_node=1)
        write_rank_end(run, attempt, 1, -9)
        write_hang_record(run, attempt, RankInHang(rank=0, host="node1", at=2.0, stacks="main", state="sleeping"))
        network = NetworkFindings(
            at=1.0,
            seconds=1.0,
            address="10.0.0.1",
            num_nodes=2,
            num_pairs=1,
            pairs=(pair,),
            lossy=(pair,),
            paces=(pace,),
        )
        write_network(run, attempt, network)
        one = Finding(check="GPUs", level="fail", found="two differ", nodes=("node2",))
        write_record(
            run.preflight(attempt),
            PreflightReport(at=1.0, seconds=1.0, nodes=("node1", "node2"), findings=(one,)),
            indent=1,
        )
    write_script_report(run, {"step": 5, "loss": 0.5})
    ask_to_stop(run)


def spoilt(value: Any, odd: Any) -> Iterator[Any]:
    """Yield copies of a value of JSON, each with another part of it replaced."""
    yield odd
    if isinstance(value, dict):
        for key, part in value.items():
            yield from ({**value, key: other} for other in spoilt(part, odd))
    elif isinstance(value, list):
        for at, part in enumerate(value):
            yield from ([*value[:at], other, *value[at + 1 :]] for other in spoilt(part, odd))


def records_of(run: RunDir) -> list[Path]:
    """Return the files of JSON in a run's directory."""
    return sorted(path for path in run.path.rglob("*") if path.suffix in {".json", ".jsonl"} and path.is_file())


def variants(path: Path, odd: Any) -> Iterator[str]:
    """Yield the file's content with one value replaced, in turn."""
    lines = path.read_text("utf-8").splitlines() if path.suffix == ".jsonl" else [path.read_text("utf-8")]
    for at, line in enumerate(lines):
        for other in spoilt(json.loads(line), odd):
            yield "\n".join([*lines[:at], json.dumps(other), *lines[at + 1 :]]) + "\n"


@pytest.mark.long
@pytest.mark.parametrize("odd", ODD, ids=lambda odd: f"{odd!r:.12}")
def test_every_value_of_every_record_may_be_odd(
    odd: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(tmp_path, [odd], every=1, monkeypatch=monkeypatch, capsys=capsys)


def test_some_values_of_records_may_be_odd(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(tmp_path, ODD, every=389, monkeypatch=monkeypatch, capsys=capsys)


def check(
    folder: Path,
    odds: Sequence[Any],
    *,
    every: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Run all commands on each `every`-th variant of the records."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", "/nonexistent")
    sound, run = make_run(folder / "runs", "sound"), make_run(folder / "runs", "odd")
    add_everything(run)
    tried = 0
    for path in records_of(run):
        whole = path.read_text("utf-8")
        for odd in odds:
            for content in variants(path, odd):
                tried += 1
                if tried % every:
                    continue
                path.write_text(content, "utf-8")
                for words in COMMANDS:
                    try:
                        code = main([*words])
                    except Exception as error:
                        raise AssertionError(f"{words} on {path.name} with {content:.300}") from error
                    printed = capsys.readouterr()
                    assert code in {0, 1}, (words, path.name, content, printed.err)
                    assert "Traceback" not in printed.err, (words, path.name, content, printed.err)
                    assert words != ["list"] or sound.name in printed.out
        path.write_text(whole, "utf-8")
    assert tried > 100


def test_a_run_with_a_value_that_its_key_takes_no_more_is_read_and_only_a_start_of_it_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`profile.kind=nsys` was one of version 0.9.0's trials."""
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "runs", "odd")
    add_everything(run)
    run.config.write_text("name: odd\nprofile:\n  kind: nsys   # command line\n")
    for words in (*COMMANDS, ["logs", "odd", "--rank", "0"]):
        assert main([*words]) in {0, 1}, words
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err, words
        assert printed.out, words

    assert main(["submit", "runs/odd/config.yaml", "name=odd", "--dry-run"]) == 2

    told = capsys.readouterr().err
    for part in ("`profile.kind`", "nsys", "line 3", "torch"):
        assert part in told
