"""Verbs for runs that are jobs of Slurm: what is refused, what a dry run prints, and a job's number as a name.

Where a run goes is in `test_choosing_a_cluster`; real jobs are in `tests/slurm`.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from ddp_hpc.base.durable import append_json_line
from ddp_hpc.cli import main
from ddp_hpc.launch.submission.submit_checks import capacity
from ddp_hpc.run.run_dir.ledger import End, Ending, record_end, record_start
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import QueuedJob, write_queued_job
from tests.full_disk import no_file_larger_than
from tests.made_run import add_progress, make_run
from tests.unit.fake_slurm import JOB
from tests.unit.made_repository import git

UP = "echo 'Slurmctld(primary) at head is UP'"
CONFIG = "recipe: {target: 'tiny:build'}\nresources: {nodes: 2, workers_per_node: 2}\nslurm: {partition: gpu}\n"


@pytest.fixture
def here(_users_part_unchecked: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current directory, with a configuration and its recipe; its `bin` comes first on PATH."""
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "tiny.py").write_text("def build(): ...")
    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    return tmp_path


def install(here: Path, **commands: str) -> None:
    for name, body in commands.items():
        (here / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (here / "bin" / name).chmod(0o755)


@pytest.fixture
def slurm(here: Path) -> Path:
    """Have a cluster here that answers, and notes what it was asked to send."""
    install(here, sbatch=f'echo sbatch "$@" >> {here}/asked; exit 1', scontrol=UP, squeue="exit 0", sacct="exit 1")
    return here


def add_job(run: RunDir, *, queued: str | None = None, had: str | None = None, cluster: str = "slurm") -> None:
    if queued is not None:
        write_queued_job(run, QueuedJob(job_id=queued, attempt=0 if had is None else 1, at=time.time()))
    if had is not None:
        known = {"attempt": 0, "job_id": had, "host": "node1", "pid": 1, "started_at": time.time(), "cluster": cluster}
        append_json_line(run.attempts, known)


def test_a_dry_run_prints_the_script_alone_and_makes_nothing(
    slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "refuse_node_local_path", lambda _: None)  # the test's own may be a node's own
    install(slurm, sbatch="exit 0")
    assert main(["submit", "run.yaml", "--dry-run", "slurm.account=lab"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert {"#SBATCH --nodes=2", "#SBATCH --partition=gpu", "#SBATCH --account=lab"} <= set(lines)
    assert any(line.startswith(f"export _DDP_HPC_IMPORT_PATH={slurm}/runs/run/snapshot #") for line in lines)
    assert any(f"-m ddp_hpc.job.supervisor {slurm}/runs/run --cluster slurm --guarded " in line for line in lines)
    assert sorted(path.name for path in slurm.iterdir()) == ["bin", "run.yaml", "tiny.py"]


def test_a_dry_run_as_json_has_the_script_that_the_other_prints(
    slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "refuse_node_local_path", lambda _: None)
    install(slurm, sbatch="exit 0")
    main(["submit", "run.yaml", "--dry-run"])
    printed = capsys.readouterr().out
    main(["submit", "run.yaml", "--dry-run", "--json"])

    planned = json.loads(capsys.readouterr().out)

    assert planned["script"] == printed
    assert planned["config"]["slurm.partition"] == {"value": "gpu", "source": "file run.yaml"}
    assert "command" not in planned


@pytest.mark.usefixtures("slurm")
def test_a_dry_run_for_this_machine_prints_no_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "run.yaml", "--dry-run", "--cluster", "local", "resources.nodes=1"]) == 0

    assert "#SBATCH" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["slurm.extra.comment=a\nb"], "`slurm.extra.comment` is 'a\\nb', but it must be one line"),
        (
            ["slurm.extra.nodes=3"],
            "`slurm.extra.nodes` sets `--nodes`, but another key sets that option already, to `2`",
        ),
        (["slurm.template=nowhere.j2"], "The job script's template (`slurm.template`) cannot be rendered: nowhere.j2"),
        (["slurm.signal_lead_s=70000"], "must be between 1 and 65535"),
    ],
)
@pytest.mark.parametrize("more", [["--dry-run"], []], ids=["dry", "wet"])
def test_what_cannot_be_a_script_is_one_error_and_leaves_nothing(
    words: list[str], told: str, more: list[str], slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [] if more else ["runs_dir=/home/nobody-here/runs"]  # the test's own directory may be a node's own

    assert main(["submit", "run.yaml", "--cluster", "slurm", *words, *runs, *more]) == 2

    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: ")
    assert told in err
    assert not (slurm / "runs").exists()
    assert not (slurm / "asked").exists()


def test_a_script_is_written_where_it_is_asked_for_too(
    slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "refuse_node_local_path", lambda _: None)  # the test's own may be a node's own
    os.mkfifo(slurm / "pipe")
    reader = os.open(slurm / "pipe", os.O_RDWR | os.O_NONBLOCK)  # open for both, so that nobody waits for anybody

    assert [main(["render", "run.yaml", f"name={name}", "-o", name]) for name in ("file", "pipe")] == [0, 0]

    scripts = {name: (slurm / "runs" / name / "job.sbatch").read_text() for name in ("file", "pipe")}
    assert (slurm / "file").read_text() == scripts["file"]
    assert main(["render", "run.yaml", "name=setup", 'slurm.setup=["echo a\\rb"]', "-o", "setup"]) == 0
    assert b"echo a\rb" in (slurm / "setup").read_bytes()  # not a line of its own
    assert "start   sbatch file\n" in capsys.readouterr().out
    assert os.read(reader, 100_000).decode() == scripts["pipe"]
    assert (slurm / "pipe").is_fifo()
    os.close(reader)


def test_a_script_that_is_written_again_keeps_what_an_earlier_command_line_has_set(
    slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run that is submitted again does: both verbs make the same request."""
    monkeypatch.setattr(capacity, "refuse_node_local_path", lambda _: None)  # the test's own may be a node's own

    assert main(["render", "run.yaml", "train.epochs=7"]) == 0
    assert main(["render", "run.yaml"]) == 0

    assert "`train.epochs=7`" in capsys.readouterr().err
    assert "epochs: 7" in (slurm / "runs" / "run" / "config.yaml").read_text()


def test_a_refused_submission_deletes_no_run_whose_configuration_could_not_be_seen_for_a_moment(
    slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a client of NFS may believe for a while that a file is not there."""
    monkeypatch.setattr(capacity, "refuse_node_local_path", lambda _: None)  # the test's own may be a node's own
    assert main(["render", "run.yaml"]) == 0
    run, looks = RunDir(slurm / "runs" / "run"), []
    (run.path / "checkpoints").mkdir(exist_ok=True)
    exists = Path.exists

    def blinks(path: Path) -> bool:
        """Return that there is no configuration, where that is asked for the first time."""
        if path == run.config:
            looks.append(path)
        return exists(path) and not (path == run.config and len(looks) == at)

    found = []
    for at in range(1, 5):
        looks.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "exists", blinks)
            found.append(main(["submit", "run.yaml", "--cluster", "slurm"]))
        assert (run.path / "checkpoints").is_dir(), at
        assert run.config.exists()

    assert set(found) == {2}
    assert "its configuration file was not visible a moment ago" in capsys.readouterr().err


def test_a_script_that_cannot_be_where_it_is_asked_for_is_refused_before_anything_is_made(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["render", "run.yaml", "-o", "bin"]) == 2

    assert "The output file is 'bin', but that is a directory" in capsys.readouterr().err
    assert not (slurm / "runs").exists()


def test_a_recipe_that_git_ignores_is_refused_before_slurm_is_asked(
    slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "refuse_node_local_path", lambda _: None)  # the test's own may be a node's own
    (slurm / ".gitignore").write_text("tiny.py\n")
    git(slurm, "init", "--quiet")

    assert main(["submit", "run.yaml", "--cluster", "slurm"]) == 2

    assert f"would not contain the recipe's module {slurm}/tiny.py" in capsys.readouterr().err
    assert not list(slurm.glob("runs/*"))
    assert not (slurm / "asked").exists()


def test_a_run_directory_of_this_node_alone_is_refused_before_slurm_is_asked(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "run.yaml", "--cluster", "slurm", "runs_dir=/dev/shm/ddp-hpc-test"]) == 2

    assert "of its own, so the job could not find it" in capsys.readouterr().err
    assert not Path("/dev/shm/ddp-hpc-test").exists()
    assert not (slurm / "asked").exists()


@pytest.mark.parametrize("enabled", ["true", "false"])
def test_code_in_a_place_that_python_would_take_for_two_is_refused_before_slurm_is_asked(
    enabled: str, slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "refuse_node_local_path", lambda _: None)  # the test's own may be a node's own
    (slurm / "co:lon").mkdir()
    for name in ("run.yaml", "tiny.py"):
        (slurm / name).rename(slurm / "co:lon" / name)
    monkeypatch.chdir(slurm / "co:lon")

    assert main(["submit", "run.yaml", "--cluster", "slurm", f"snapshot.enabled={enabled}"]) == 2

    code = f"{slurm}/co:lon" + ("/runs/run/snapshot" if enabled == "true" else "")
    assert f"import the code from {code}, but Python reads a `:` in that path" in capsys.readouterr().err
    assert not (slurm / "co:lon" / "runs").exists()
    assert not (slurm / "asked").exists()


def test_a_run_that_goes_on_with_code_from_another_directory_says_so(
    slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two projects with one directory of runs, whose runs are called alike."""
    monkeypatch.setattr(capacity, "refuse_node_local_path", lambda _: None)  # the test's own may be a node's own
    for project in ("one", "two"):
        (slurm / project).mkdir()
        for name in ("run.yaml", "tiny.py"):
            (slurm / project / name).write_text(f"{(slurm / name).read_text()}  # {project}")
        monkeypatch.chdir(slurm / project)
        for _ in range(2):
            assert main(["render", "run.yaml", f"runs_dir={slurm}/runs"]) == 0

    said = capsys.readouterr()
    assert f"{said.out}{said.err}".count("changed: code ") == 1
    assert f"changed: code {slurm}/one -> {slurm}/two\n" in f"{said.out}{said.err}"


@pytest.mark.parametrize("number", ["17", "18"])
def test_a_run_is_found_by_the_number_of_a_job_that_waits_and_of_one_it_had(
    number: str, slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_job(make_run(slurm / "runs", "wanted"), had="17", queued="18")
    add_job(make_run(slurm / "runs", "other"), queued="170")
    add_job(make_run(slurm / "runs", "local"), had="17", cluster="local")

    assert main(["status", number, "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["run"] == "wanted"


def test_a_task_of_an_array_is_found_by_both_its_numbers(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_job(make_run(slurm / "runs", "wanted"), queued="17_3")

    assert main(["status", "17_3", "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["run"] == "wanted"


def test_a_run_that_is_called_like_a_job_wins(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_job(make_run(slurm / "runs", "wanted"), queued="17")
    make_run(slurm / "runs", "17")

    assert main(["status", "17", "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["run"] == "17"


@pytest.mark.usefixtures("slurm")
def test_a_number_of_no_job_is_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    add_job(make_run(Path("runs"), "wanted"), queued="17")

    assert main(["status", "99"]) == 2

    assert "'99' is neither a run in" in capsys.readouterr().err


def test_a_job_that_waits_is_told_with_its_reason_in_words(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_job(make_run(slurm / "runs", "wanted"), queued="17")
    fields = ["17", "17", "N/A", "PENDING", "Priority", "N/A"]
    row = "".join(f"{field}\\037" for field in fields).removesuffix("\\037") + "\\036"
    install(slurm, squeue=f"printf '{row}'")

    assert main(["status", "wanted", "--json"]) == 0

    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["job_id"], told["source"]) == ("waiting", "17", "squeue")
    assert told["reason"] == "jobs with higher priority are ahead of the job in the queue; wait for its turn"


def test_slurm_that_is_down_does_not_keep_anybody_from_looking(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_job(make_run(slurm / "runs", "wanted"), queued="17")
    down = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
    install(slurm, squeue=down, scontrol=down)

    assert [main(["status", "wanted", "--json"]), main(["list"])] == [0, 0]

    told = json.loads(capsys.readouterr().out.split("\n}\n")[0] + "\n}")
    assert told["state"] == "waiting"
    assert "Slurm does not answer" in told["source"]


def test_a_run_that_writes_is_looked_at_without_slurm(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(here / "runs", "wanted")
    add_job(run, had="17")
    add_progress(run, at=time.time())
    install(here, squeue=f"touch {here}/asked", scontrol=f"touch {here}/asked")

    assert main(["status", "17", "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["state"] == "running"
    assert not (here / "asked").exists()


WAITS = "echo 'JobId=17 JobName=x UserId=ada(1) JobState=PENDING Reason=None Command=x'"


def test_a_job_that_waits_is_not_stopped(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(slurm / "runs", "wanted")
    add_job(run, queued="17")
    install(slurm, scontrol=WAITS)

    assert main(["stop", "17"]) == 2

    assert "wanted is not running, so there is nothing to stop" in (told := capsys.readouterr().err)
    assert f"`ddp-hpc cancel {run.path}`" in told
    assert not run.stop_request.exists()


def test_of_a_run_that_has_ended_no_waiting_job_is_spoken_of(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(slurm / "runs", "wanted")
    add_job(run, queued="17")
    record_start(run, attempt=0, job_id="17", cluster="slurm")
    record_end(run, 0, End(ending=Ending.FINISHED, exit_code=0))

    assert main(["requeue", "wanted"]) == 2

    assert "there is nothing to stop. Start it with `ddp-hpc submit`" in (told := capsys.readouterr().err)
    assert "cancel" not in told


def test_who_submits_a_run_that_is_stopping_in_its_job_is_not_promised_that_the_command_waits(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = JOB.format(job=17, state="RUNNING", reason="None", restarts=0, preempted="None")
    install(slurm, scontrol=f'if [ "$3" = job ]; then echo "{shown}"; else {UP}; fi')
    run = make_run(slurm / "runs", "run")
    add_job(run, had="17")
    write_queued_job(run, QueuedJob(job_id="17", attempt=0, at=time.time()))
    run.stop_request.touch()

    main(["submit", "run.yaml", "--cluster", "slurm"])

    out, err = capsys.readouterr()
    assert "run is stopping, because a user asked it to; submit it again when it has stopped\n" in err
    assert "run is running already (attempt 0, job 17), so nothing was started" in out


def test_a_job_that_waits_is_cancelled_by_its_number(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_job(make_run(slurm / "runs", "wanted"), queued="17")
    install(slurm, scontrol=WAITS, scancel=f'echo "$@" > {slurm}/cancelled')

    assert main(["cancel", "17"]) == 0

    assert capsys.readouterr().out.startswith("Job 17 of wanted was cancelled.")
    assert (slurm / "cancelled").read_text() == "17\n"
    assert main(["status", "wanted", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "cancelled"


def test_on_a_full_disk_a_job_is_cancelled_all_the_same_and_what_is_not_written_down_is_said(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_job(make_run(slurm / "runs", "wanted"), queued="17")
    install(slurm, scontrol=WAITS, scancel=f"mkdir {slurm}/cancelled-$1")  # `mkdir` writes to no file

    with no_file_larger_than(0):
        code = main(["cancel", "17"])

    assert code == 1
    assert (slurm / "cancelled-17").is_dir()
    said = capsys.readouterr().err
    assert said.startswith("error: Job 17 of wanted was cancelled, but ddp-hpc could not record that in ")
    assert "File too large" in said
