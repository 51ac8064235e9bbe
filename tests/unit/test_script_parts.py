"""The parts of a script's run that need no process: its command, its source, its exit codes, its saved files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.record import write_record
from ddp_hpc.cli import main
from ddp_hpc.cli.status_text import as_text, last_save_text
from ddp_hpc.cli.summary import headline
from ddp_hpc.cli.verbs.list import _row
from ddp_hpc.cli.verbs.submit import _notes_on_earlier_saves
from ddp_hpc.cluster.rendezvous.worker_env import USERS_CODE
from ddp_hpc.job.script.liveness import ScriptActivity
from ddp_hpc.job.script.plan import frozen_code_dirs, make_script_plan, users_python_path
from ddp_hpc.job.script.source import sets_endpoint, why_not_fork
from ddp_hpc.job.script.watcher import LogEcho, worker_exit_code
from ddp_hpc.run.config.resolve import load_resolved, render_resolved, resolve
from ddp_hpc.run.requeue import DecisionInputs, decide_next
from ddp_hpc.run.run_dir.failure_reports import first_failure
from ddp_hpc.run.run_dir.ledger import Cause, Ledger, record_start
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import Progress, write_progress
from ddp_hpc.run.spec import ResourcesSpec, RunSpec, ScriptSpec, parse_program
from ddp_hpc.run.workload import script_progress
from ddp_hpc.run.workload.protocol import UsersCode
from ddp_hpc.run.workload.script_progress import SeenFiles, find_saved_files, look, read_seen_files
from ddp_hpc.run.workload.table import workload_of
from ddp_hpc.watch.checkpoints import why_without_checkpoint
from ddp_hpc.watch.status import effect_of_resubmitting, read_status, stop_text
from tests.made_run import make_run

SURROUNDINGS = Path(__file__).parents[1] / "distributed" / "scripts" / "surroundings.py"


@pytest.mark.parametrize(
    ("command", "script", "module", "name"),
    [
        ("python train.py --lr 0.1", "train.py", None, "train"),
        ("python3.11 -u -X dev src/my.train.py", "src/my.train.py", None, "my.train"),
        ("/opt/env/bin/python train.py -m other", "train.py", None, "train"),
        ("python -m pkg.train --x", None, "pkg.train", "train"),
        ("python -m pkg.__main__", None, "pkg.__main__", "pkg"),
        ("python -mpkg.train --epochs 3", None, "pkg.train", "train"),
        ("python -um train data.csv", None, "train", "train"),
        ("python -uXdev -Om train", None, "train", "train"),
        ("python -uX dev train.py", "train.py", None, "train"),
        ("python -Wmodule -uB train.py", "train.py", None, "train"),
        ("python -bucpass train.py", None, None, "python"),
        ("python -um", None, None, "python"),
        ("python -c pass", None, None, "python"),
        ("python", None, None, "python"),
        ("./train.sh python x.py", None, None, "train"),
        ("pythonic train.py", None, None, "pythonic"),
    ],
)
def test_a_command_is_read_as_a_shell_and_python_read_it(
    command: str, script: str | None, module: str | None, name: str
) -> None:
    program = parse_program(command.split())

    assert (program.script, program.module, program.name) == (script, module, name)


def test_the_words_of_a_command_line_come_back_as_they_were_from_the_runs_configuration(tmp_path: Path) -> None:
    words = ["python", "train.py", "--lr", "0.1", "", "a b", "null", "1e3", "k=v", "--", "é", "#", "[x", "'"]
    resolved = resolve(None, [f"runs_dir={tmp_path}"], {}, command=words)
    kept = tmp_path / "config.yaml"
    kept.write_text(render_resolved(resolved), encoding="utf-8")

    spec = load_resolved(kept)

    assert list(spec.script.command) == words
    assert spec.name == "train"
    assert resolved.sources["script.command"] == "command line"


def test_a_script_needs_no_global_batch_that_fits_its_world_and_gets_its_stop_signal_from_ddp_hpc_alone() -> None:
    spec = RunSpec(
        name="any", resources=ResourcesSpec(workers_per_node=3), script=ScriptSpec(command=("python", "train.py"))
    )

    assert spec.slurm.signal_to == "batch"


@pytest.mark.parametrize(
    "values",
    [
        {"command": ("",)},
        {"command": ("a\0b",)},
        {"command": ("a", "\udcff")},
        {"resume_exit_codes": (0,)},
        {"resume_exit_codes": (256,)},
        {"progress": "ck/epoch-{epoch}.pt"},
        {"progress": "'ck/*.pt'"},
        {"progress": "s3://bucket/*.pt"},
        {"stop_within_s": 0},
        {"preload": ("my-module",)},
        {"stop_signal": "KILL"},
    ],
)
def test_what_no_script_can_mean_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"`script\."):
        ScriptSpec(**values)  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["submit"], "Neither a configuration file nor a script is named"),
        (["submit", "--"], "no command follows it"),
        (["submit", "name=x"], "the configuration file is missing"),
    ],
)
def test_a_submission_of_nothing_is_refused(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert expected in capsys.readouterr().err


# --- the source of a script --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'\nimport torch",
            "line 2 of the script sets CUDA_VISIBLE_",
        ),
        ("import os\nos.environ.setdefault('OMP_NUM_THREADS', '1')\nimport torch", "sets OMP_NUM_THREADS"),
        ("import os\nos.environ.update(MKL_NUM_THREADS='1')\nfrom torch import nn", "sets MKL_NUM_THREADS"),
        ("import os\nos.environ.update({'KMP_AFFINITY': 'x'})\nimport torch.nn", "sets KMP_AFFINITY"),
        ("from os import environ\nif 1:\n    environ['TORCH_LOGS'] = 'x'\nimport helpers", "sets TORCH_LOGS"),
        ("import multiprocessing as mp\nmp.set_start_method('spawn')\nimport torch", "calls `set_start_method`"),
        ("import torch, os\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'", ""),
        ("import os\nos.environ['WANDB_MODE'] = 'offline'\nimport torch", ""),
        ("import os\nprint(os.environ['OMP_NUM_THREADS'])\nimport torch", ""),
        ("import torch\nif __name__ == '__main__':\n    torch.multiprocessing.set_start_method('spawn')", ""),
        ("this is no Python", ""),
    ],
)
def test_a_script_that_must_act_before_torch_is_imported_is_noticed(source: str, expected: str) -> None:
    found = why_not_fork(source)

    assert expected in found
    assert bool(found) == bool(expected)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("os.environ['MASTER_PORT'] = '12355'", True),
        ('environ[ "MASTER_ADDR" ]="localhost"', True),
        ("os.environ.setdefault('MASTER_ADDR', 'localhost')", True),
        ("os.environ.update(\n    MASTER_ADDR=address,\n)", True),
        ("if os.environ['MASTER_ADDR'] == 'localhost': pass", False),
        ("address = os.environ['MASTER_ADDR']", False),
        ("x.update(y)\nMASTER_ADDR = 1", False),
    ],
)
def test_a_script_that_says_where_its_ranks_meet_is_noticed(source: str, expected: bool) -> None:
    assert sets_endpoint(source) == expected


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("bash -x run.sh", True),
        ("./run.sh", True),
        ("bash other.sh", False),
        ("bash -c MASTER_PORT=1;other.sh", True),
        ("env MASTER_ADDR=localhost python uses.py", True),
        ("env MASTERS=1 python where.py", False),
        ("python -X dev uses.py", True),
        ("python -X dev uses_package.py", True),
        ("python uses.py", False),  # a fork sees what the module does when it meets the others
        ("python -X dev other.py", False),
    ],
)
def test_so_is_a_shell_and_a_module_that_a_new_process_imports(command: str, expected: bool, tmp_path: Path) -> None:
    sets = "import os\nos.environ['MASTER_PORT'] = '1'\n"
    files = {
        "run.sh": "set -e\nexport MASTER_ADDR=$(hostname)\n", "other.sh": "# MASTER_ADDR=x\necho $MASTER_ADDR\n",
        "where.py": sets, "uses.py": "import json\nfrom where import *\n", "pkg/where.py": sets,
        "uses_package.py": "from pkg import where\n", "other.py": "import json, uses\n",
    }  # fmt: skip
    (tmp_path / "pkg").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    plan = make_script_plan(ScriptSpec(command=tuple(command.split())), None, {"PATH": os.environ["PATH"]}, tmp_path)

    assert plan.sets_endpoint == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch, re\nre.compile('x')\nnet = torch.nn.Linear(1, 1)\n", False),
        ("import torch\nnet = torch.compile(torch.nn.Linear(1, 1))\n", True),
        ("net.compile()", True),
        ("from torch import compile as speed_up", True),
        ("import lightning as L", True),
        ("from transformers import Trainer", True),
        ("import torch._dynamo.config", True),
    ],
)
def test_a_script_that_may_compile_is_noticed_so_that_the_compiler_is_imported_once_for_all(
    source: str, expected: bool, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(source)

    plan = make_script_plan(ScriptSpec(command=("python", "train.py")), None, {}, tmp_path)

    assert plan.may_compile == expected


def test_a_script_that_is_there_starts_in_a_fork_of_the_python_that_ddp_hpc_runs_in(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\n")

    for python in ("python", "python3", sys.executable):
        plan = make_script_plan(ScriptSpec(command=(python, "train.py", "--x")), None, {}, tmp_path)

        assert (plan.why_exec, plan.executable, plan.argv0) == ("", sys.executable, "train.py")
        assert (plan.path, plan.folder) == (tmp_path / "train.py", str(tmp_path.resolve()))


def test_a_python_beside_the_one_that_ddp_hpc_runs_in_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `/usr/bin`; links to the same one are not."""
    (tmp_path / "train.py").touch()
    for name, target in (("python3.12", sys.executable), ("python", "python3.12"), ("python3.9", "/bin/sh")):
        (tmp_path / name).symlink_to(target)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3.12"))

    same, other = (
        make_script_plan(ScriptSpec(command=(str(tmp_path / name), "train.py")), None, {}, tmp_path)
        for name in ("python", "python3.9")
    )

    assert same.why_exec == ""
    assert "python3.9 is not the Python that ddp-hpc runs in" in other.why_exec


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["python", "-um", "train", "--x"], ""),
        (
            ["python", "-X", "dev", "train.py"],
            "`script.command` gives Python the option `-X`, which only a new process can have",
        ),
        (["./run.sh"], "`script.command` starts no Python script"),
        (["/bin/sh", "run.sh"], "`script.command` starts no Python script"),
    ],
)
def test_other_commands_start_as_new_processes(command: list[str], why: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o755)

    plan = make_script_plan(ScriptSpec(command=tuple(command)), None, {"PATH": os.environ["PATH"]}, tmp_path)

    assert plan.why_exec == why
    as_python_reads_it = ["-u", "-m", "train", "--x"] if "-um" in command else command[1:]
    assert plan.command == ([sys.executable, *as_python_reads_it] if command[0] == "python" else command)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["python", "nowhere.py"], r"starts the script 'nowhere\.py', but .*nowhere\.py does not exist"),
        (["./nowhere.sh"], r"nowhere\.sh does not exist"),
        (["./plain.sh"], r"is not an executable file\. Make it executable with `chmod \+x`, .* `bash \./plain\.sh`"),
        (["./plain.py"], r"`python \./plain\.py`"),
        (["plain.py"], r"PATH has no such program\. For a file in this directory, write `python FILE`"),
        (["/no/python", "plain.py"], r"/no/python is not an executable file"),
    ],
)
def test_a_command_that_cannot_start_is_refused_with_what_to_do(
    command: list[str], expected: str, tmp_path: Path
) -> None:
    (tmp_path / "plain.sh").write_text("")
    (tmp_path / "plain.py").write_text("")

    with pytest.raises(ConfigError, match=expected):
        make_script_plan(ScriptSpec(command=tuple(command)), None, {"PATH": os.environ["PATH"]}, tmp_path)


# --- what its end means ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "was_asked", "expected"),
    [
        (0, False, 0),
        (1, False, 1),
        (2, False, 1),  # argparse's, and many others': not our code for a configuration that is refused
        (93, False, 1),  # nor is any other code of ours
        (97, False, 1),
        (99, False, 99),
        (85, False, 99),  # asked for in the test
        (-15, False, 1),
        (143, False, 1),
        (0, True, 99),
        (-10, True, 99),  # by the signal it was sent
        (138, True, 99),
        (-15, True, 99),  # by one that Slurm sent to all processes at the same time
        (-9, True, 1),
        (1, True, 1),
        (99, True, 99),
    ],
)
def test_exit_codes_of_scripts_mean_what_the_user_says_and_nothing_of_ours(
    code: int, was_asked: bool, expected: int
) -> None:
    usr1 = 10

    assert worker_exit_code(code, stop_signal=usr1 if was_asked else None, resume_codes=(85, 99)) == expected


# --- what it has saved -------------------------------------------------------------------------------------------------


def test_saves_are_counted_whatever_clocks_say_and_however_few_files_a_script_keeps(tmp_path: Path) -> None:
    run = make_run(tmp_path, "run")
    (tmp_path / "ckpt").mkdir()
    spec = RunSpec(name="run", script=ScriptSpec(command=("python", "a.py"), progress=f"{tmp_path}/ckpt/*.pt"))
    counts = []

    def save(name: str, at: float) -> None:
        (tmp_path / "ckpt" / name).write_text(name)
        os.utime(tmp_path / "ckpt" / name, (at, at))

    def count() -> None:
        counts.append(workload_of(spec).progress(run, Ledger.read(run)))
        write_record(run.script_progress, look(read_seen_files(run), str(spec.script.progress), tmp_path))

    count()
    save("1.pt", 2e9)  # by a node whose clock is years ahead
    count()
    count()  # nothing new
    save("2.pt", 1e9)
    count()
    (tmp_path / "ckpt" / "1.pt").unlink()  # an older one is removed
    count()
    save("2.pt", 1e9 + 1)  # the same file, overwritten
    count()
    save("half.pt.tmp", 1e9 + 5)
    count()

    assert counts == [0, 1, 1, 2, 2, 3, 3]


def test_a_directory_that_the_pattern_matches_counts_with_its_files(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / "model.bin").write_text("x")

    assert list(find_saved_files("checkpoint-*", tmp_path)) == [str(tmp_path / "checkpoint-5" / "model.bin")]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("**/*.pt", ["a/b/2.pt", "a/1.pt"]),
        ("a/**", ["a/.hidden/4.pt", "a/.last.pt", "a/1.pt", "a/b/2.pt"]),
        ("a**/1.pt", ["a/1.pt"]),
        ("a/1.pt", ["a/1.pt"]),
        ("a/1.pt/", ["a/1.pt"]),
        ("./a//[0-9].pt", ["a/1.pt"]),
        ("a/.*.pt", ["a/.last.pt"]),
        ("a/link/*.pt", ["a/link/1.pt"]),
        ("a/self.pt", []),
        ("nowhere/*.pt", []),
    ],
)
def test_a_pattern_finds_files_though_links_lead_in_circles(pattern: str, expected: list[str], tmp_path: Path) -> None:
    for name in ("a/1.pt", "a/b/2.pt", "a/.last.pt", "a/.hidden/4.pt", "a/half.tmp"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in ("link", "other"):
        (tmp_path / "a" / name).symlink_to(".")
        (tmp_path / "a" / "b" / name).symlink_to("..")
    (tmp_path / "a" / "self.pt").symlink_to("self.pt")

    assert sorted(find_saved_files(pattern, tmp_path)) == sorted(f"{tmp_path}/{name}" for name in expected)


def test_a_save_is_seen_beside_a_file_whose_name_is_no_utf8(tmp_path: Path) -> None:
    run = make_run(tmp_path, "run")
    (tmp_path / os.fsdecode(b"old\xe9.pt")).touch()
    write_record(run.script_progress, look(read_seen_files(run), "*.pt", tmp_path))
    (tmp_path / "new.pt").touch()

    seen = look(read_seen_files(run), "*.pt", tmp_path)

    assert (seen.num_changes, len(seen.files)) == (1, 2)


def test_what_is_there_before_a_run_or_under_another_pattern_is_no_save_of_it(tmp_path: Path) -> None:
    (tmp_path / "old.pt").touch()
    (tmp_path / "old.bin").touch()

    first = look(SeenFiles(), "*.pt", tmp_path)
    second = look(first, "*.bin", tmp_path)

    assert (first.num_changes, second.num_changes) == (0, 0)


def test_a_pattern_that_names_a_data_set_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_progress, "MOST_FILES", 3)
    for number in range(4):
        (tmp_path / f"{number}.pt").touch()
    spec = RunSpec(name="run", script=ScriptSpec(command=("python", "a.py"), progress=f"{tmp_path}/*.pt"))

    with pytest.raises(ConfigError, match="names 3 files or more"):
        _notes_on_earlier_saves(spec, None)


def test_the_code_of_a_script_is_its_directory_and_of_a_module_where_it_is_imported_from(tmp_path: Path) -> None:
    (tmp_path / "src" / "pkg").mkdir(parents=True)
    for name in ("src/train.py", "src/pkg/__main__.py", "src/pkg/train.py"):
        (tmp_path / name).touch()

    def code_of(command: str, *paths: Path) -> UsersCode | None:
        return workload_of(RunSpec(name="a", script=ScriptSpec(command=tuple(command.split())))).users_code(paths)

    assert code_of("python src/train.py", tmp_path) == UsersCode(tmp_path / "src", Path("train.py"))
    assert code_of("python -m pkg.train", tmp_path / "src") == UsersCode(tmp_path / "src", Path("pkg/train.py"))
    assert code_of("python -m pkg", tmp_path, tmp_path / "src") == UsersCode(tmp_path / "src", Path("pkg/__main__.py"))
    assert code_of("python -m torch.utils.collect_env", tmp_path) is None
    assert code_of("bash src/train.py", tmp_path) is None
    assert code_of("python nowhere.py", tmp_path) is None


def test_the_jobs_copy_of_the_code_is_what_starts(tmp_path: Path) -> None:
    frozen = tmp_path / "snapshot" / "src"
    (frozen / "pkg").mkdir(parents=True)
    for name in ("train.py", "pkg/train.py"):
        (frozen / name).touch()
    environ = {USERS_CODE: str(frozen), "PYTHONPATH": f"{frozen}:/users/own"}

    [code] = frozen_code_dirs(environ, [tmp_path / "snapshot"])
    script = make_script_plan(ScriptSpec(command=("python", "src/train.py")), code, {}, tmp_path)
    module = make_script_plan(ScriptSpec(command=("python", "-m", "pkg.train")), code, {}, tmp_path)

    assert code == frozen
    assert (script.path, script.argv0, script.folder) == (frozen / "train.py", str(frozen / "train.py"), str(frozen))
    assert module.folder == str(frozen)
    assert users_python_path(environ) == ["/users/own"]
    assert frozen_code_dirs(environ, [tmp_path / "elsewhere"]) == []


def test_the_source_of_a_module_is_found_where_its_python_finds_it(tmp_path: Path) -> None:
    (tmp_path / "src" / "pkg").mkdir(parents=True)
    (tmp_path / "src" / "pkg" / "train.py").write_text(
        "import os\nfrom pkg import net\nos.environ['MASTER_PORT'] = '29500'\n"
    )
    spec = ScriptSpec(command=("python", "-m", "pkg.train"), start="exec")

    plan = make_script_plan(spec, None, {"PYTHONPATH": f"/nowhere:{tmp_path / 'src'}"}, tmp_path)

    assert plan.sets_endpoint
    assert not plan.may_compile


def test_status_and_list_show_when_a_script_has_last_saved_and_no_step(tmp_path: Path) -> None:
    run = make_run(tmp_path, "run")
    record_start(run, attempt=0, job_id="7", first_step=0)
    now = time.time()
    write_progress(run, Progress(attempt=0, saves=2, last_checkpoint_at=now - 35, at=now))

    status = read_status(run, now=now)

    rows = dict(line.split(maxsplit=1) for line in as_text(status, now=now).splitlines())
    assert rows["saved"] == "35 s ago"
    assert _row(status)[5] == "35 s ago"
    assert "step" not in rows
    assert status.reason.endswith("it starts the script again, with what it has saved")  # nobody runs it here
    assert headline(status) == f"run {status.state}; last saved 35 s ago"


def test_what_a_script_saved_after_the_last_look_counts_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed script has saved files that its watcher has not seen; no process looks for them again."""
    run = make_run(tmp_path, "run")
    record_start(run, attempt=0, job_id="7", first_step=0)
    now = time.time()
    write_record(run.script_progress, look(SeenFiles(), "ckpt/*.pt", tmp_path))
    write_progress(run, Progress(attempt=0, saves=0, at=now - 9))
    assert effect_of_resubmitting(run).endswith("no file that `script.progress` names shows a save of this run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "last.pt").write_text("x")
    os.utime(tmp_path / "ckpt" / "last.pt", (now - 3, now - 3))

    assert last_save_text(read_status(run, now=now)) == "3 s ago"
    assert effect_of_resubmitting(run) == "it starts the script again, with what it has saved"
    assert stop_text(run).endswith("Submit it again: it starts the script again, with what it has saved.")
    assert f"Files that `script.progress` names: {tmp_path}/ckpt/last.pt." in why_without_checkpoint(run)
    os.utime(tmp_path / "ckpt" / "last.pt", (now + 90, now + 90))  # by a file server whose clock is ahead
    assert last_save_text(read_status(run, now=now)) == "0 s ago"


# --- in processes that need no torch -----------------------------------------------------------------------------------

RUN_HERE = """
import os
from pathlib import Path
from ddp_hpc.job.script.interpreter import run_as_main
from ddp_hpc.job.script.plan import make_script_plan
from ddp_hpc.run.spec import ScriptSpec
command = os.environ.pop("COMMAND").split("|")
plan = make_script_plan(ScriptSpec(command=("python", *command)), None, os.environ, Path.cwd())
assert not plan.why_exec, plan.why_exec
os._exit(run_as_main(plan, {**os.environ}, ["/users/own"], lambda error: None))
"""


@pytest.mark.parametrize(
    "command", [["surroundings.py", "--a", "b c", ""], ["./inner/surroundings.py"], ["-m", "inner.surroundings", "-x"]]
)
def test_a_script_that_runs_in_a_process_that_was_there_finds_what_a_plain_python_gives_it(
    command: list[str], tmp_path: Path
) -> None:
    (tmp_path / "inner").mkdir()
    for folder in (tmp_path, tmp_path / "inner"):
        shutil.copy(SURROUNDINGS, folder)
    plain = {**os.environ, "PYTHONPATH": "/users/own"}
    ours = {**plain, "RANK": "0", "COMMAND": "|".join(command)}

    for argv, environ in (([sys.executable, *command], plain), ([sys.executable, "-c", RUN_HERE], ours)):
        subprocess.run(argv, cwd=tmp_path, env=environ, stdin=subprocess.DEVNULL, check=True, capture_output=True)

    expected, found = (json.loads((tmp_path / f"found-{name}.json").read_text()) for name in ("plain", "0"))
    found["path"] = [path for path in found["path"] if path]  # of `python -c`
    assert {key: (expected[key], found[key]) for key in expected if expected[key] != found[key]} == {}


def test_a_script_is_alive_while_it_computes_or_prints_and_not_while_it_sleeps(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    source = "import sys\nfor line in sys.stdin:\n    print(sum(range(20_000_000)), flush=True)\n"
    with subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as script:
        compute(script)  # Python has started
        life = ScriptActivity(pid=script.pid, log=log, interval_s=0.0)
        life.was_active()
        compute(script)
        assert life.was_active()
        log.write_text("x")
        assert life.was_active()
        time.sleep(0.5)
        assert not life.was_active()
        script.kill()


def compute(script: subprocess.Popen[bytes]) -> None:
    """Have a script compute for a moment, and wait until it has."""
    assert script.stdin is not None
    assert script.stdout is not None
    script.stdin.write(b"\n")
    script.stdin.flush()
    script.stdout.readline()


WORK = """
import os, sys
from ddp_hpc.base import processes
from ddp_hpc.job.script.worker import main
processes.block_awaited_signals()  # as agents do
os._exit(main(sys.argv[1], os.environ, attempt=0, listen_fd=None))
"""
RANK_ONE = {"RANK": "1", "LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("shell", "code", "expected"),
    [
        ("exit 0", 0, ""),
        ("exit 99", 99, ""),
        ("exit 97", 1, "the script exited with code 97 and printed nothing"),
        ("mkdir -p runs/run/checkpoints/attempt-1.writing; exit 1", 97, ""),  # a newer attempt has claimed the run
        ("echo no data; exit 2", 1, "the script exited with code 2; its last line: no data"),
        ("kill -9 $$", 1, "killed by SIGKILL"),
        ("kill -40 $$", 1, "killed by signal 40 ("),
        ("printf '\\\\377\\\\000\\\\001x\\\\n'; exit 5", 1, "the script exited with code 5; its last line: "),
        ("sleep 600 & echo $! > child; exit 3", 1, "the script exited with code 3"),
        (
            "sleep 600 & echo $! > child; touch runs/run/STOP; exec sleep 600",
            99,
            "",
        ),  # by the signal that the script got for it
        (
            "trap 'echo saved; exit 7' USR1; touch runs/run/STOP; while :; do sleep 0.1; done",
            1,
            "code 7; its last line: saved",
        ),
        (
            "trap '' TERM USR1; touch runs/run/STOP; while :; do sleep 0.1; done",
            1,
            "did not exit within 1 s after SIGUSR1",
        ),
    ],
)
def test_a_worker_starts_its_script_asks_it_to_stop_and_says_what_its_end_means(
    shell: str, code: int, expected: str, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "runs" / "run")
    run.path.mkdir(parents=True)
    settings = [f"runs_dir={tmp_path / 'runs'}", "name=run", "script.stop_signal=USR1", "script.stop_within_s=1"]
    resolved = resolve(None, settings, {"DDP_HPC_SITE_PROFILE": ""}, command=["/bin/sh", "-c", shell])
    run.config.write_text(render_resolved(resolved), encoding="utf-8")

    argv, environ = [sys.executable, "-c", WORK, str(run.path)], {**os.environ, **RANK_ONE}
    done = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=60)

    failure = first_failure(run, 0)
    assert done.returncode == code, done.stderr
    assert (failure is None) == (not expected)
    assert failure is None or expected in failure.exception
    if (child := tmp_path / "child").exists():
        ends_at = time.monotonic() + 30  # a process runs for a moment after it was sent SIGKILL
        while is_running(left := int(child.read_text())):
            assert time.monotonic() < ends_at, f"{left} still runs"
            time.sleep(0.02)


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("progress", "expected"),
    [
        (
            None,
            "3 attempts in a row failed (each failure counts, because `script.progress` does not say which files the script",
        ),
        (
            "saved/*.pt",
            "3 attempts in a row ended without a new file of `script.progress` ('saved/*.pt'), so the run ends",
        ),
    ],
)
def test_a_run_that_ends_for_lack_of_progress_names_the_key_by_which_a_script_shows_progress(
    progress: str | None, expected: str
) -> None:
    spec = RunSpec(name="any", script=ScriptSpec(command=("python", "train.py"), progress=progress))
    words = workload_of(spec).without_progress
    situation = DecisionInputs(cause=Cause.WORKER_CRASHED, num_without_progress=3, without_progress=words)

    assert decide_next(situation, spec.restart).why.startswith(expected)


def test_the_watcher_of_a_script_that_prints_faster_than_the_console_takes_is_not_kept_by_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "rank-0.log"
    log.touch()
    echo, shown = LogEcho(log), bytearray()

    def write(_fd: int, data: memoryview) -> int:
        shown.extend(data)
        with log.open("ab") as file:  # meanwhile
            file.write(b"more\n" * 10)
        return len(data)

    log.write_bytes(b"first\n")
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write)
        echo.copy_new()
        assert bytes(shown) == b"first\n"
        echo.copy_new()
    assert bytes(shown) == b"first\n" + b"more\n" * 10
