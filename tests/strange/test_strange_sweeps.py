"""Sweeps by users, of files and on file systems that the authors did not have in mind."""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.base.durable import append_json_line
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.processes import host_name, take_lock
from ddp_hpc.cli import main
from ddp_hpc.launch.submission import local
from ddp_hpc.launch.sweep.manage_sweep import continue_sweep
from ddp_hpc.launch.sweep.point_configs import PointResolver
from ddp_hpc.launch.sweep.points import make_points, parse_axis, read_points
from ddp_hpc.launch.sweep.sweep_dir import Sweep, SweepDir, load_base, make_sweep, read_sweep, record_continued
from ddp_hpc.run.config.resolve import resolve
from ddp_hpc.run.run_dir.paths import RunDir
from tests.full_disk import no_file_larger_than
from tests.made_run import add_attempt

HOSTILE = 'it\'s "q" $HOME `id` %d {a} {point} ${a} \\ * é日本\nline 2'
COMMAND = ("--", "python", "train.py", "{a}", '{"k": 1}', "{nothing}", "--at={point}")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text('import sys\nopen("argv", "w").write(ascii(sys.argv[1:]))\n')


def submit(*words: str) -> int:
    return main(["submit", "--cluster", "local", "name=grid", *words, *COMMAND])


def dry_points(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    """Return the points that a submission would start."""
    assert submit("--dry-run", "--json", *words) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["points"]
    return found


def made_sweep(words: tuple[str, ...] = ("a=1..3",)) -> SweepDir:
    """Make a sweep whose first point has finished."""
    sweep_dir = SweepDir(Path("runs/grid").absolute())
    base = resolve(None, ["name=grid"], {}, command=COMMAND[1:])
    points = make_points([parse_axis(word) for word in words])
    make_sweep(Sweep(dir=sweep_dir, points=points, backend="local"), base)
    run = sweep_dir.run(read_sweep(sweep_dir).points[0])
    run.path.mkdir()
    run.config.write_text(f"name: {run.name}\n")
    add_attempt(run, ending="finished")
    return sweep_dir


# --- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        ["1e-3", "-0.5", "+1", "1_000", "010", "0x10"],
        ["null", "true", "no", "~", "None"],
        ["x=y", "a/b", "/data/x y", "--flag", "-", "..", "ü", "日本", "100%", "a:b", "#1", "&x", "*x", "!x"],
        ["{x: 1, y: 2}", "[1, 2]", "{a}", "{point}", "{{a}}"],
        ["it's", "a b", "a\tb", "$HOME", "${a}", "`id`", "a\\nb"],
    ],
)
def test_a_scripts_words_get_each_value_as_it_was_typed(values: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    points = dry_points(capsys, "--sweep", f"a={','.join(values)}")

    assert [point["set"] for point in points] == [{"a": value} for value in values]
    assert len({point["name"] for point in points}) == len(values)


def test_what_stands_in_braces_in_a_value_is_not_replaced_again() -> None:
    base = resolve(None, ["name=grid"], {}, command=COMMAND[1:])
    (point,) = make_points([], [{"a": HOSTILE}])

    command = PointResolver(base, {}).resolve(point).spec.script.command

    assert command == ("python", "train.py", HOSTILE, '{"k": 1}', "{nothing}", f"--at={point.name}")


def test_values_of_which_nothing_is_left_in_a_name_or_the_same_have_names_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    points = dry_points(capsys, "--sweep", "a=x y,x:y,ü,日本,x/y,z/y", "--sweep", "seed=0,1")

    assert len({point["name"].lower() for point in points}) == 12


# --- files of points ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("- {a: 1}\n", [{"a": 1}]),
        ("- a: 1\n- a: 1.0\n- a: '1'\n", [{"a": 1}, {"a": 1.0}, {"a": "1"}]),
        ("\ufeff- {a: 1}\r\n- {a: 2}\r\n", [{"a": 1}, {"a": 2}]),
        ("- &one {a: 1, name: one}\n- {<<: *one, name: two, seed: 2}\n", [{"a": 1}, {"a": 1, "seed": 2}]),
        ("- {a: 123456789012345678901234567890}\n", [{"a": "123456789012345678901234567890"}]),
        ("- {a: 2026-01-01}\n- {a: 12:30}\n- {a: 010}\n", [{"a": "2026-01-01"}, {"a": "12:30"}, {"a": 10}]),
        ("- {a: null}\n- {a: no}\n- {a: true}\n", [{"a": None}, {"a": "no"}, {"a": True}]),
        ('[{"a": 1, "recipe": {"args": {"k": {"l": 2}}}}]', [{"a": 1, "recipe.args.k": {"l": 2}}]),
    ],
)
def test_a_file_of_points_in_any_style_of_yaml_gives_its_values(
    text: str, settings: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("points.yaml").write_bytes(text.encode())

    assert [point["set"] for point in dry_points(capsys, "--points", "points.yaml")] == settings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{a: 1}", "must be a list"),
        ("a: 1\nb: 2\n", "must be a list"),
        ("- [1, 2]\n", "must be a list"),
        ("---\n- {a: 1}\n---\n- {a: 2}\n", "line 3"),
        ("- {a: 1\n", "not valid YAML"),
        ("- {a: 1, a: 2}\n", "already set"),
        ("- !!python/object/apply:os.system [id]\n", "the tag"),
        (
            "- {a: 1, seed: 123456789012345678901234567890}\n",
            "`seed` is 123456789012345678901234567890, which has more than 64 bits",
        ),
        ("- {a: 1, name: a/b}\n", "a directory's name"),
        ("- {a: 1, name: ..}\n", "a directory's name"),
        ("- {a: 1, name: 001-a-2}\n- {a: 2}\n", "the same name"),
        ('- {a: "x\\0y"}\n', "NUL"),
        ("- {a: 1, resources: {nodes: 2}}\n", "`resources.nodes` cannot be swept"),
        ("- {a: 1, point: x}\n", "`point` cannot be swept"),
    ],
)
def test_a_file_that_no_sweep_can_be_made_of_is_refused_and_nothing_is_made(
    text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("points.yaml").write_text(text)

    assert submit("--points", "points.yaml") == 2

    assert message in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_file_of_points_that_is_missing_or_a_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml' cannot be read: No such file"):
        read_points(Path("gone.yaml"))
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_points(tmp_path)


# --- names -------------------------------------------------------------------------------------------------------------


def test_a_sweep_does_not_take_the_name_of_a_run_nor_a_run_that_of_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/grid").mkdir(parents=True)
    Path("runs/grid/config.yaml").write_text("name: grid\n")
    assert submit("--sweep", "a=1,2") == 2
    assert "exists already, but it is not a sweep" in capsys.readouterr().err
    shutil.rmtree("runs/grid")
    made_sweep()

    assert submit() == 2

    assert "grid is a sweep in " in capsys.readouterr().err
    assert submit("--sweep", "a=1,2") == 2
    assert "The sweep grid exists already" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["status", "logs", "stop", "cancel", "checkpoints"])
@pytest.mark.parametrize("word", ["grid", "runs/grid/"])
def test_a_command_for_runs_that_names_a_sweep_is_answered_with_how_to_name_its_points(
    verb: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made_sweep()

    assert main([verb, word]) != 0

    error = capsys.readouterr().err
    assert f"'{word}' is a sweep of several runs" in error
    assert f"`{word.rstrip('/')}/0`" in error


# --- disks and habits --------------------------------------------------------------------------------------------------


def test_a_line_that_was_cut_off_while_it_was_written_hides_nothing_before_and_nothing_after_it() -> None:
    sweep_dir = made_sweep()
    before = read_sweep(sweep_dir)
    with sweep_dir.ledger.open("a") as file:
        file.write('{"array":"12')

    assert read_sweep(sweep_dir) == before
    record_continued(sweep_dir, is_cancelled=False, forgiven={}, limits={"at_most": 7})

    after = read_sweep(sweep_dir)
    assert (after.points, after.at_most) == (before.points, 7)


def test_an_empty_list_of_points_is_called_damaged_by_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    sweep_dir = made_sweep()
    sweep_dir.ledger.write_text("")

    for words in (["list", "grid"], ["sweep", "continue", "grid"], ["sweep", "cancel", "grid"]):
        assert main(words) == 2
        assert "sweep.jsonl is damaged" in capsys.readouterr().err


def test_a_point_whose_directory_a_user_has_deleted_is_to_be_sent_again_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sweep_dir = made_sweep()
    sweep = read_sweep(sweep_dir)
    for point in sweep.points[1:]:
        shutil.copytree(sweep_dir.run(sweep.points[0]).path, sweep_dir.run(point).path)
    shutil.rmtree(sweep_dir.run(sweep.points[1]).path)

    assert main(["list", "grid"]) == 0

    assert "3 points: 2 finished, 1 not submitted" in capsys.readouterr().out
    assert continue_sweep(sweep_dir, {}, limits={}).numbers == [1]


def test_a_sweep_is_cancelled_twice_and_continued_where_nothing_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    made_sweep(("a=1",))

    assert main(["sweep", "cancel", "grid"]) == main(["sweep", "cancel", "grid"]) == 0
    assert main(["sweep", "continue", "grid"]) == main(["sweep", "continue", "grid", "--failed"]) == 0

    assert capsys.readouterr().out.count("no point is left") == 2


def test_a_sweep_runs_in_a_directory_with_spaces_and_its_script_gets_hostile_text_as_it_is() -> None:
    runs_dir = Path("my runs é%d").absolute()
    Path("points.yaml").write_text(json.dumps([{"a": HOSTILE}]))

    assert submit(f"runs_dir={runs_dir}", "script.start=exec", "--points", "points.yaml") == 0
    sweep_dir = SweepDir(runs_dir / "grid")
    (point,) = read_sweep(sweep_dir).points

    assert ast.literal_eval(Path("argv").read_text()) == [HOSTILE, '{"k": 1}', "{nothing}", f"--at={point.name}"]
    assert load_base(sweep_dir).spec.runs_dir == str(runs_dir)


# --- what a machine or a disk does ------------------------------------------------------------------------------------


def test_a_list_of_points_that_is_cut_in_its_middle_is_damaged_and_not_a_shorter_sweep(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sweep_dir = made_sweep()
    lines = sweep_dir.ledger.read_text().splitlines(keepends=True)
    sweep_dir.ledger.write_text("".join(lines[:-1]))

    assert main(["list", "grid"]) == 2
    assert "it has 2 of 3 points" in capsys.readouterr().err


def test_a_point_whose_disk_does_not_answer_is_unknown_and_the_others_are_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sweep_dir = made_sweep()
    point = sweep_dir.run(read_sweep(sweep_dir).points[0])
    point.attempts.unlink()
    point.attempts.symlink_to("/proc/self/mem")  # reading that is an I/O error

    assert main(["list", "grid"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:4]
    assert [row.split()[1] for row in rows] == ["unknown", "not", "not"]


def test_a_text_with_control_characters_stays_in_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    base = resolve(None, ["name=grid"], {}, command=COMMAND[1:])
    points = make_points([], [{"a": "\x1b[2Jx\ny"}, {"a": "z"}])
    make_sweep(Sweep(dir=SweepDir(Path("runs/grid").absolute()), points=points, backend="local"), base)

    assert main(["list", "grid"]) == 0
    out = capsys.readouterr().out
    assert "\\x1b[2Jx\\ny" in out
    assert "2 points: 2 not submitted" in out


def test_a_point_that_was_interrupted_is_started_again() -> None:
    sweep_dir = made_sweep(("a=1",))
    run = sweep_dir.run(read_sweep(sweep_dir).points[0])
    run.attempts.unlink()
    add_attempt(run, ending=None)

    assert continue_sweep(sweep_dir, {}, limits={}).numbers == [0]


def test_a_sweep_that_was_renamed_and_is_continued_from_elsewhere_makes_its_points_where_it_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep_dir = made_sweep()
    moved = SweepDir(sweep_dir.path.rename(tmp_path / "runs" / "other"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    sweep = read_sweep(moved)
    run = PointResolver(load_base(moved), {}).resolve(sweep.points[1]).spec.path

    assert run == moved.run(sweep.points[1]).path
    assert sweep.work_dir == tmp_path  # where the points' scripts are looked for


# --- secrets -----------------------------------------------------------------------------------------------------------


def test_a_value_that_may_be_a_secret_stands_in_no_name_no_output_and_no_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ("--", "python", "train.py", "{api_key}")
    words = ["submit", "--cluster", "local", "name=grid", "--dry-run", "--sweep", "seed=1,2"]
    axes = ["--sweep", "env.API_TOKEN=sk-secret1,sk-secret2", "--sweep", "api_key=sk-secret3"]

    assert main([*words, *axes, *command]) == main([*words, *axes, "--json", *command]) == 0
    assert main([*words, "--sweep", "env.API_TOKEN=sk-secret1,sk-secret1", *command]) == 2
    assert main([*words, "--sweep", "env.API_TOKEN=sk-secret1,", *command]) == 2
    assert main([*words, "--sweep", "api_key=sk-secret1", "--sweep", "nothing=1", *command]) == 2
    printed = capsys.readouterr()

    assert "sk-secret" not in printed.out + printed.err
    assert "001-seed-1\n" in printed.out
    assert "env.API_TOKEN=(not shown)" in printed.err
    (point,) = make_points([], [{"recipe.args.login": {"user": "ada", "password": "sk-secret"}}])
    assert "sk-secret" not in str(point)


def test_a_point_that_cannot_be_cancelled_from_here_is_not_said_to_be_cancelled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_dir = made_sweep(("a=1,2",))
    runs = [sweep_dir.run(point) for point in read_sweep(sweep_dir).points]
    for run in runs:
        run.attempts.unlink(missing_ok=True)
        run.path.mkdir(exist_ok=True)
        run.config.write_text(f"name: {run.name}\n")
        add_attempt(run)
    cancelled: list[str] = []

    def cancel(run: RunDir, _environ: object) -> None:
        if run.name == runs[0].name:
            raise ConfigError("it runs on another host. Cancel it there")
        cancelled.append(run.name)

    monkeypatch.setattr(local, "find_job", lambda _run, _environ: object())
    monkeypatch.setattr(local, "cancel", cancel)

    assert main(["sweep", "cancel", "grid"]) == 2
    captured = capsys.readouterr()
    assert "it runs on another host" in captured.err
    assert "were cancelled" not in captured.out
    assert cancelled == [runs[1].name]  # the others all the same


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Yield two processes that sleep."""
    processes = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def test_on_a_full_disk_all_points_of_a_sweep_are_cancelled_and_what_is_not_written_down_is_said(
    sleepers: list[subprocess.Popen[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_dir = made_sweep(("a=1,2",))
    locks = []
    for point, process in zip(read_sweep(sweep_dir).points, sleepers, strict=True):
        run = sweep_dir.run(point)
        run.attempts.unlink(missing_ok=True)
        run.path.mkdir(exist_ok=True)
        run.config.write_text(f"name: {run.name}\n")
        known = {"attempt": 0, "job_id": "1", "host": host_name(), "pid": process.pid, "started_at": 1.0}
        append_json_line(run.attempts, known)
        locks.append(take_lock(run.lock))

    with no_file_larger_than(0):
        code = main(["sweep", "cancel", "grid"])

    assert code == 1
    assert [process.wait(30) for process in sleepers] == [-signal.SIGKILL] * 2
    said = capsys.readouterr().err
    assert "grid was cancelled, but ddp-hpc could not record that for all points" in said
    assert "sweep.jsonl: File too large." in said
    for lock_fd in locks:
        assert lock_fd is not None
        os.close(lock_fd)
