"""The page of a run: whole for every kind of run, small, safe, and loading nothing."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.cli import main
from ddp_hpc.run.run_dir.ledger import Cause, End, Ending, record_end, record_start
from ddp_hpc.run.run_dir.machine_use import MachineUse, append_use
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import Progress, QueuedJob, write_progress, write_queued_job
from ddp_hpc.watch.report.page import page_of
from ddp_hpc.watch.report.reading import read_run
from tests.made_run import add_checkpoint, add_failure, add_log, make_run
from tests.report.made import BEGIN, Plan, large_run, line_of, made_run

NOW = BEGIN + 5_000.0
TRACEBACK = 'Traceback (most recent call last):\n  File "/home/me/model.py", line 31, in forward\n    x\nKeyError: 7\n'


class Outline(HTMLParser):
    """The headings, texts and links of a page; every element that has to be closed is closed in order."""

    VOID = frozenset({"meta", "link", "br"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.texts: list[str] = []
        self.addresses: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in {"src", "href", "action", "xlink:href"}]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in {"src", "href", "action", "xlink:href"}]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in {"style", "script"} and data.strip():
            self.texts.append(" ".join(data.split()))
            if self.open[-1] == "h2":
                self.headings.append(self.texts[-1])

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def page(run: RunDir, **more: Any) -> Outline:
    return Outline(page_of(read_run(run, now=NOW, **more), now=NOW))


def test_a_run_of_ten_attempts_with_64_ranks_is_one_small_page(tmp_path: Path) -> None:
    run = large_run(tmp_path / "large")

    text = page_of(read_run(run, now=NOW), now=NOW)

    assert len(text.encode()) < 300_000  # 2 MB are asked for
    assert text.count('<div class="row" ') == 10
    assert Outline(text).headings == [
        "Where the time went",
        "Attempt 7 failed: Slurm preempted the job",
        "Loss and throughput",
        "Where a step's time goes",
        "Notes",
    ]


def test_a_page_loads_nothing(tmp_path: Path) -> None:
    text = page_of(read_run(large_run(tmp_path / "large"), now=NOW), now=NOW)

    assert Outline(text).addresses == ["data:,"]
    assert not re.findall(r"url\(|@import|\bfetch\(|XMLHttp|WebSocket|\bimport\(", text)
    assert "default-src 'none'" in text


def test_a_run_in_the_queue_has_a_page(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_queued_job(run, QueuedJob(job_id="7", attempt=0, at=NOW - 60))

    found = page(run)

    assert "No attempt has begun, so there is nothing to draw yet." in found.text
    assert found.headings == ["Notes"]


def test_a_run_that_died_before_its_first_step_says_why(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    record_start(run, attempt=0, job_id="1")
    record_end(run, 0, End(ending=Ending.FAILED, exit_code=1, reason="rank 1: KeyError: 7", cause=Cause.WORKER_CRASHED))
    add_failure(run, rank=1, exception="KeyError: 7", traceback=TRACEBACK, exception_type="KeyError")
    add_log(run, TRACEBACK, rank=1)

    found = page(run)

    assert found.headings[0] == "Attempt 0 failed: an exception in the user's code"
    assert "rank 1 on node1, at step 7: KeyError: 7" in found.text
    assert "No loss was logged" in found.text


@pytest.mark.parametrize(
    ("saves", "said"),
    [(3, "The script has saved its state."), (0, "The script has reported no save of its state.")],
)
def test_a_script_says_what_is_missing_and_how_to_get_it(saves: int, said: str, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    record_start(run, attempt=0, job_id="1")
    record_end(run, 0, End(ending=Ending.FINISHED, exit_code=0))
    write_progress(run, Progress(attempt=0, saves=saves, at=NOW))

    found = page(run)

    assert said in found.text
    assert "0 to 0" not in found.text  # its steps are not known
    assert "the newest that it reports by ddp_hpc.attach" in found.text
    assert "there are no charts of them" in found.text


def test_a_script_that_was_stopped_is_not_said_to_have_a_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    record_start(run, attempt=0, job_id="1")
    record_end(run, 0, End(ending=Ending.STOPPED, exit_code=99))
    write_progress(run, Progress(attempt=0, saves=0, step=7, at=NOW))

    assert "with a checkpoint" not in page(run).text


def test_a_run_of_an_older_version_has_a_page_without_phases_and_waits(tmp_path: Path) -> None:
    run = made_run(tmp_path / "old", [Plan(first=0, reached=300, ending="finished")])
    run.timeline.unlink()
    run.waits.unlink()

    found = page(run)

    assert "older version of ddp-hpc" in found.text
    assert "goodput" not in found.text
    assert "Loss and throughput" in found.headings


@pytest.mark.parametrize(
    "values", [[math.nan] * 30, [1.0, math.inf, 2.0], [5.0], [0.0, -1.0, -3.0], [3.0, 3.0], [1e300, 1e-300]]
)
def test_any_losses_are_drawn_or_marked(values: list[float], tmp_path: Path) -> None:
    run = made_run(tmp_path / "odd", [Plan(first=0, reached=300, ending="finished")])
    run.metrics.write_text(
        "".join(line_of(kind="train", step=step, loss=one, at=1.0) for step, one in enumerate(values))
    )

    text = page_of(read_run(run, now=NOW), now=NOW)

    assert text.count('class="c-broken"') == sum(not math.isfinite(one) for one in values)
    assert not re.findall(r'd="[^"]*(?:nan|inf)', text)


def test_names_and_reasons_with_markup_are_shown_as_text(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\"'&`x<b>`"
    run = made_run(tmp_path / "<img src=x onerror=alert(1)>", [Plan(first=0, reached=300, reason=evil)])
    with run.metrics.open("a") as file:
        file.write(line_of(kind="eval", step=300, at=1.0, **{'"><script>alert(2)</script>': 0.5}))

    text = page_of(read_run(run, now=NOW), now=NOW)

    found = Outline(text)
    assert text.count("<script>") == 1  # ours
    assert "<img" not in text
    assert "onerror" not in "".join(found.addresses)
    assert "<script>alert(1)</script>" in found.text


def test_a_line_that_is_being_written_and_lines_of_others_do_no_harm(tmp_path: Path) -> None:
    run = made_run(tmp_path / "torn", [Plan(first=0, reached=300, ending=None)])
    for path in (run.attempts, run.metrics, run.timeline, run.waits, run.slow_ranks):
        with path.open("a") as file:
            file.write('[1]\n"x"\n\0\0\n{"kind":"phases","attempt":"no"}\n{"attempt": 0, "kin')

    assert "Loss and throughput" in page(run).headings


def test_another_run_beside_this_one_shows_what_differs_without_secrets(tmp_path: Path) -> None:
    run = made_run(tmp_path / "one", [Plan(first=0, reached=300, ending="finished")])
    other = made_run(tmp_path / "two", [Plan(first=0, reached=200, ending="finished")], every=50)
    for each, secret in ((run, "hidden-a"), (other, "hidden-b")):
        with each.config.open("a") as file:
            file.write(f"env:\n  MY_TOKEN: {secret}\n")

    text = page_of(read_run(run, now=NOW), now=NOW, against=read_run(other, now=NOW))

    found = Outline(text)
    assert "Beside two" in found.headings
    assert "checkpoint.every_steps 100 50" in found.text
    assert "hidden-" not in text


def test_what_cannot_be_read_of_the_other_run_is_said(tmp_path: Path) -> None:
    run, other = (made_run(tmp_path / name, [Plan(first=0, reached=300)]) for name in ("one", "two"))
    other.metrics.unlink()
    other.metrics.mkdir()

    text = page_of(read_run(run, now=NOW), now=NOW, against=read_run(other, now=NOW))

    assert re.search(r"two: [^:]*metrics", Outline(text).text)


def test_checkpoints_are_listed_with_their_size_and_their_damage(tmp_path: Path) -> None:
    run = made_run(tmp_path / "one", [Plan(first=0, reached=300, ending="finished")])
    add_checkpoint(run, 200)
    (add_checkpoint(run, 300) / "manifest.json").write_text("{")

    found = page(run)

    assert "Checkpoints" in found.headings
    assert "ddp-hpc continues no run from this checkpoint" in found.text


def test_attempts_without_end_are_cut_to_the_newest_forty(tmp_path: Path) -> None:
    run = made_run(tmp_path / "many", [Plan(first=0, reached=0) for _ in range(300)])

    text = page_of(read_run(run, now=NOW), now=NOW)

    assert text.count('<div class="row" ') == 40
    assert "260 earlier ones" in text


def test_the_verb_writes_a_file_and_prints_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    made_run(tmp_path / "runs" / "one", [Plan(first=0, reached=300, ending="finished")])
    (tmp_path / "runs" / "one").chmod(0o555)  # another user's run is read only

    assert main(["report", "one"]) == 0
    assert main(["report", "one", "-o", "page.html"]) == 0

    assert capsys.readouterr().out.split() == ["one-report.html", "page.html"]
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_a_sweep_has_a_page_with_its_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "grid"
    for number in range(3):
        made_run(folder / f"grid-{number}", [Plan(first=0, reached=300, ending="finished")])
    header = {
        "sweep": "grid",
        "num_points": 4,
        "backend": "local",
        "import_paths": [],
        "work_dir": ".",
        "at_most": None,
    }
    points = [{"point": number, "name": f"grid-{number}", "set": {"train.lr": number}} for number in range(4)]
    lines = [{**header, "stop_after_failures": None}, *points]
    (folder / "sweep.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    assert main(["report", "grid"]) == 0

    found = Outline(Path(capsys.readouterr().out.strip()).read_text())
    assert found.headings == ["What each key changes", "Points", "Losses"]
    assert "4 points: 3 finished, 1 not begun." in found.text


def test_secrets_in_the_words_of_an_exception_are_not_in_the_page(tmp_path: Path) -> None:
    environ = {"WANDB_API_KEY": "0123456789abcdef"}
    said = "RuntimeError: 401 of https://bob:hunter2@hub/api?token=abc, 0123456789abcdef"
    run = made_run(tmp_path / "run", [Plan(first=0, reached=50, reason=said)])

    text = page_of(read_run(run, now=NOW, environ=environ), now=NOW)

    assert "401 of https://bob:***@hub/api?token=***, ***" in text
    assert not re.search(r"hunter2|token=abc|0123456789abcdef", text)


def test_control_characters_and_a_change_of_direction_can_be_seen(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", [Plan(first=0, reached=50, reason="OSError: \x1b[2J gnp\u202eexe.\x00")])

    text = page_of(read_run(run, now=NOW), now=NOW)

    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", text)
    assert r"OSError: \x1b[2J gnp\u202eexe.\x00" in text


def test_a_timeline_that_cannot_be_read_is_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", [Plan(first=0, reached=50, ending="finished")])
    run.timeline.unlink()
    run.timeline.mkdir()

    found = page(run)

    assert "The timeline cannot be read" in found.text
    assert "Loss and throughput" in found.headings


def test_a_page_shows_how_busy_the_machines_were_and_says_why_the_gpus_wait(tmp_path: Path) -> None:
    run = large_run(tmp_path / "run")
    for node_rank in range(2):
        for at in range(100, 1000, 100):
            use = MachineUse(
                node_rank=node_rank,
                node=f"node{node_rank}",
                at=BEGIN + at,
                seconds=100.0,
                gpu_busy=0.3,
                gpu_memory_gib=8.0,
                gpu_memory_total_gib=80.0,
                num_cpus=8.0,
                cpu_busy=0.99,
            )
            append_use(run, 0, use)

    shown = page(run)

    assert "How busy the machines were" in shown.headings
    assert "GPUs 30% busy, 8.0 of 80.0 GiB of GPU memory; 8 CPUs a node 99% busy" in shown.text
    assert (
        "The GPUs are idle for much of the time: they are busy 30% of the time, while the 8 CPUs of each node are 99% busy"
        in shown.text
    )
