"""The verbs that read: status, list, logs, checkpoints, export, config."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc import __version__
from ddp_hpc.cli import GROUPS, VERBS, main
from ddp_hpc.cli.verbs.config import EVERYDAY_KEYS
from ddp_hpc.run.config.keys import all_keys
from ddp_hpc.run.run_dir.paths import RunDir
from tests.made_run import add_attempt, add_checkpoint, add_log, add_progress, make_run
from tests.unit.made_state import save


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Return a stopped run in `runs`, here."""
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "runs")
    add_attempt(run, ending="stopped")
    add_progress(run, step=20, metrics={"loss": 0.25, "accuracy": 0.9833})
    add_checkpoint(run, 20, accuracy=0.9833)
    run.console.parent.mkdir()
    run.console.write_text("hello\n")
    return run


def answer(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """Run a command that says nothing on stderr; return what it printed."""
    assert main(words) == code
    out, err = capsys.readouterr()
    assert err == ""
    return out


def complaint(capsys: pytest.CaptureFixture[str], *words: str, code: int = 2) -> str:
    """Run a command that fails; return what it said."""
    try:
        assert main(words) == code
    except SystemExit as end:  # argparse
        assert end.code == code  # noqa: PT017  # either way ends the process with it
    out, err = capsys.readouterr()
    assert out == ""
    return err


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_tells_how_it_is_used(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([verb, "--help"])

    assert end.value.code == 0
    assert f"usage: ddp-hpc {verb}" in capsys.readouterr().out


def test_help_lists_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])

    out = capsys.readouterr().out
    assert [verb for verb in VERBS if f"\n  {verb} " not in out] == []


def test_help_begins_with_the_eight_commands_of_every_day(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(GROUPS["every day"]) == 8
    with pytest.raises(SystemExit):
        main(["--help"])

    out = capsys.readouterr().out
    assert list(map(out.index, [f"\n{title}:\n" for title in GROUPS])) == sorted(
        out.index(f"\n{title}:\n") for title in GROUPS
    )


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])

    assert capsys.readouterr().out == f"ddp-hpc {__version__}\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "which command? `ddp-hpc --help` lists them."),
        (("fly",), "'fly' is not a command. `ddp-hpc --help` lists them."),
        (("statsu",), "'statsu' is not a command. Did you mean 'status'? "),
        (("--json", "status"), "unrecognized arguments: --json"),
        (("status", "--bogus"), "unrecognized arguments: --bogus. `ddp-hpc status --help` lists the options."),
        (("submit", "run.yaml", "--folow"), "unrecognized arguments: --folow. Did you mean '--follow'? "),
        (
            ("submit", "train.py", "--lr", "1"),
            "a script's command stands after `--`: `ddp-hpc submit -- python train.py`",
        ),
        (("submit", "lr=1", "torchrun", "train.py"), "`ddp-hpc submit -- python train.py`"),
        (("status", "digist"), "'digist' is neither a run in 'runs' nor a run directory. Runs there: digits."),
        (("logs", "digits", "--rank", "0", "--all"), "not allowed with argument"),
        (("logs", "digits", "--rank", "9"), "no logs yet"),
        (("config", "train.lrr"), "Did you mean `train.lr`?"),
        (("export", "digits", "-o", "out", "--ema"), "no 'ema' weights"),
        (("export", "digits", "-o", "out", "--step", "3"), "no checkpoint of step 3. Steps with a checkpoint: 20."),
        (("stop", "digits"), "not running"),
        (("cancel", "digits"), "not running"),
    ],
)
def test_bad_words_are_told_in_one_line_and_exit_2(
    words: tuple[str, ...], told: str, run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    said = complaint(capsys, *words)

    assert told in said
    assert sum("error: " in line for line in said.splitlines()) == 1


@pytest.mark.parametrize("words", [("status",), ("status", "digits"), ("status", "runs/digits")])
def test_status_tells_where_a_run_stands(
    words: tuple[str, ...], run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = answer(capsys, *words).splitlines()

    assert f"run         digits  ({run.path})" in lines
    assert "state       stopped" in lines
    assert "step        20 of 100, epoch 3 of 10" in lines
    assert "evaluation  loss 0.2500  accuracy 0.9833" in lines
    assert any(line.startswith("checkpoint  step 20") for line in lines)


def test_status_as_json_has_the_promised_keys(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    status = json.loads(answer(capsys, "status", "digits", "--json"))

    promised = {
        "run",
        "job_id",
        "state",
        "step",
        "total_steps",
        "epoch",
        "loss",
        "attempt",
        "last_checkpoint",
        "source",
    }
    assert (promised | {"age_s"}) - status.keys() == set()
    assert (status["run"], status["state"], status["step"], status["last_checkpoint"]) == ("digits", "stopped", 20, 20)


def test_json_has_null_where_a_loss_is_no_number(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    add_progress(run, loss=float("nan"))

    text = answer(capsys, "status", "--json")

    assert json.loads(text, parse_constant=pytest.fail)["loss"] is None


def test_list_has_a_row_a_run_and_the_newest_last(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    add_attempt(make_run(run.path.parent, "mnist"))

    header, *rows = answer(capsys, "list").splitlines()
    listed = json.loads(answer(capsys, "list", "--json"))

    assert header.split()[:3] == ["RUN", "STATE", "STEP"]
    assert [row.split()[:2] for row in rows] == [["digits", "stopped"], ["mnist", "interrupted"]]
    assert [(status["run"], status["state"]) for status in listed] == [("digits", "stopped"), ("mnist", "interrupted")]


def test_list_of_nothing_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        answer(capsys, "list", "--runs-dir", str(tmp_path))
        == f"There are no runs in {str(tmp_path)!r}. List another directory with `--runs-dir DIR`.\n"
    )
    assert json.loads(answer(capsys, "list", "--runs-dir", str(tmp_path), "--json")) == []


@pytest.mark.parametrize(
    "environment",
    [{"DDP_HPC__RUNS_DIR": "elsewhere"}, {"DDP_HPC_SITE_PROFILE": "site.yaml"}],
)
def test_runs_are_looked_for_where_the_site_or_the_user_keeps_them(
    environment: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "elsewhere")
    (tmp_path / "site.yaml").write_text("runs_dir: elsewhere")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert json.loads(answer(capsys, "status", "--json"))["run"] == "digits"


def test_logs_are_the_consoles_unless_a_rank_is_chosen(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    add_log(run, "from rank 1\n", rank=1)

    assert answer(capsys, "logs", "digits") == "hello\n"
    assert answer(capsys, "logs", "digits", "--rank", "1", "--attempt", "0") == "from rank 1\n"
    assert answer(capsys, "logs", "--all", "digits") == "==> attempt 0 <==\n[rank 1] from rank 1\n"


def test_following_the_logs_of_a_run_that_has_ended_ends(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "logs", "-f", "digits") == "hello\n"


def test_following_a_log_that_somebody_has_deleted_says_so(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    add_log(run, "from rank 0\n", rank=0)
    run.console.unlink()

    assert main(["logs", "-f", "digits"]) == 2

    assert "does not exist any more. What ranks have printed is still there" in capsys.readouterr().err


def test_checkpoints_tell_which_hold(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        answer(capsys, "checkpoints", "digits").splitlines()[1].endswith("accuracy 0.9833  not checked (add --verify)")
    )
    assert answer(capsys, "checkpoints", "digits", "--verify").splitlines()[1].endswith("yes")

    next(run.checkpoints.glob("*/*.safetensors")).write_bytes(b"")

    rows = json.loads(answer(capsys, "checkpoints", "digits", "--verify", "--json", code=1))["checkpoints"]
    assert "has 0 bytes" in rows[0]["problem"]


def test_a_digest_is_one_line_and_that_of_the_newest(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    text = answer(capsys, "checkpoints", "digits", "--digest")
    as_json: dict[str, Any] = json.loads(answer(capsys, "checkpoints", "digits", "--digest", "--json"))

    assert int(text, 16)
    assert as_json == {"digest": text.strip()}
    add_checkpoint(run, 40)
    assert answer(capsys, "checkpoints", "digits", "--digest") != text


def test_a_digest_of_what_does_not_hold_is_an_error(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    next(run.checkpoints.glob("*/*.safetensors")).unlink()

    assert "error: " in complaint(capsys, "checkpoints", "digits", "--digest", code=1)


def test_a_run_without_checkpoints_is_no_error_to_list(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    other = make_run(run.path.parent, "mnist")

    assert answer(capsys, "checkpoints", "mnist") == (
        "mnist has no checkpoint yet. A run writes one every `checkpoint.every_steps` steps, and when it stops or ends. "
        f"`ddp-hpc status {other.word}` shows how far it is.\n"
    )
    assert "has no checkpoint yet" in complaint(capsys, "checkpoints", "mnist", "--digest")


def test_export_writes_one_file_and_says_of_what(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "export", "digits", "-o", "out.st") == "wrote 1 tensors of digits, step 20, to out.st\n"
    assert Path("out.st").stat().st_size > 0


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ((), " (the moving average, which was evaluated; `--no-ema` exports the weights themselves)"),
        (("--ema",), " (the moving average, which was evaluated; `--no-ema` exports the weights themselves)"),
        (("--no-ema",), " (not their moving average)"),
    ],
)
def test_export_says_whether_the_weights_are_the_average(
    flag: tuple[str, ...], told: str, run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    save(run, 3, attempt=9, ema=True)

    wrote = "wrote 7 tensors of digits, step 3, to out.st"
    assert answer(capsys, "export", "digits", "--step", "3", "-o", "out.st", *flag) == f"{wrote}{told}\n"


@pytest.mark.parametrize(
    "words", [("config", "seed", "--"), ("config", "--", "seed"), ("config", "--json", "--", "seed")]
)
def test_two_dashes_end_the_options_and_may_stand_last(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "seed" in answer(capsys, *words)


def test_config_prints_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [line.split()[0] for line in answer(capsys, "config", "--all").splitlines() if line[0] != " "]
    rows = json.loads(answer(capsys, "config", "train.lr", "--json"))

    assert keys == [*all_keys()]
    assert rows == [{"key": "train.lr", "type": "a number", "default": "0.1", "meaning": "Peak learning rate."}]


def test_config_shows_the_thirty_keys_of_every_day_first_as_wide_as_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")

    lines = answer(capsys, "config").splitlines()

    assert {line.split()[0] for line in lines if " = " in line and line[0] != " "} == EVERYDAY_KEYS
    assert len(EVERYDAY_KEYS) == 30
    assert max(len(line) for line in lines if line.startswith(" ")) <= 60
    assert f"{len(all_keys()) - 30} more keys: `ddp-hpc config --all`, or `ddp-hpc config SECTION`" in "\n".join(lines)


def test_a_reader_that_goes_away_is_no_error(run: RunDir) -> None:
    add_log(run, "a line\n" * 100_000)
    command = [sys.executable, "-m", "ddp_hpc", "logs", "digits", "--attempt", "0"]

    with subprocess.Popen(command, cwd=run.path.parents[1], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()

    assert said == b""
