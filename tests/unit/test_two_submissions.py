"""Two processes that submit one run at the same moment start it once."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddp_hpc.base import processes
from ddp_hpc.base.errors import ConfigError, RunBusyError, SlurmUnavailableError
from ddp_hpc.launch.submission import local, slurm
from ddp_hpc.launch.submission.backend import Submission
from ddp_hpc.launch.submission.removal import delete_run
from ddp_hpc.launch.submission.request import SubmitRequest
from ddp_hpc.launch.submission.run_dir_setup import lock_submission
from ddp_hpc.launch.submission.submit_checks import capacity
from ddp_hpc.run.config.resolve import Resolved, flat_spec
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import ResourcesSpec, RunSpec
from tests.unit.fake_slurm import FakeSlurm


@pytest.fixture
def cluster(_users_part_unchecked: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Have a cluster that takes its time over each job, and calls it 7."""
    cluster = FakeSlurm(tmp_path)
    cluster.knows(state="PENDING", reason="Priority")
    cluster.has("srun", "true")
    cluster.has("sbatch", '[ "$1" = --test-only ] || { sleep 1; echo Submitted batch job 7; }')
    monkeypatch.setenv("PATH", cluster.environ["PATH"])
    monkeypatch.setattr(capacity, "refuse_node_local_path", lambda _: None)  # the test's own may be a node's own
    return cluster


def submit(runs_dir: Path, cluster: FakeSlurm) -> Submission:
    spec = RunSpec(name="net", runs_dir=str(runs_dir), resources=ResourcesSpec(nodes=2))
    return slurm.submit(request_of(spec, cluster))


def request_of(spec: RunSpec, cluster: FakeSlurm) -> SubmitRequest:
    resolved = Resolved(spec, dict.fromkeys(flat_spec(spec), "test"))
    return SubmitRequest(resolved=resolved, import_paths=[], environ=cluster.environ)


def jobs_sent(cluster: FakeSlurm) -> list[str]:
    return [order for order in cluster.orders("sbatch") if "--test-only" not in order]


def test_two_that_submit_a_run_that_was_there_send_one_job(tmp_path: Path, cluster: FakeSlurm) -> None:
    submit(tmp_path / "runs", cluster)
    run = RunDir(tmp_path / "runs" / "net")
    run.submission.unlink()  # as after a job that ended long ago

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: submit(tmp_path / "runs", cluster), range(2)))

    assert sorted(one.state for one in both) == ["queued", "waiting"]
    assert {one.job_id for one in both} == {"7"}
    assert len(jobs_sent(cluster)) == 2, "one before, one now"


def test_slurm_is_asked_once_whether_it_has_a_job_of_the_run(tmp_path: Path, cluster: FakeSlurm) -> None:
    submit(tmp_path / "runs", cluster)
    cluster.knows(state="CANCELLED")
    called = tmp_path / "called"
    called.unlink()

    assert submit(tmp_path / "runs", cluster).state == "queued"

    assert called.read_text().count("show job 7") == 1


def test_who_does_not_get_his_turn_sends_nothing_and_says_so(
    tmp_path: Path, cluster: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(tmp_path / "runs", cluster)
    run = RunDir(tmp_path / "runs" / "net")
    run.submission.unlink()
    monkeypatch.setattr(slurm, "_SUBMISSION_PATIENCE_S", 0.1)

    with (
        lock_submission(run, patience_s=60.0),
        pytest.raises(RunBusyError, match="Another process has been submitting net"),
    ):
        submit(tmp_path / "runs", cluster)

    assert run.config.exists()
    assert len(jobs_sent(cluster)) == 1


def test_a_run_that_is_being_submitted_is_neither_deleted_nor_put_aside(tmp_path: Path, cluster: FakeSlurm) -> None:
    submit(tmp_path / "runs", cluster)
    run = RunDir(tmp_path / "runs" / "net")
    run.submission.unlink()

    with (
        lock_submission(run, patience_s=60.0),
        pytest.raises(RunBusyError, match="is submitting net at this moment"),
    ):
        delete_run(run, cluster.environ)

    assert run.config.exists()
    delete_run(run, cluster.environ)
    assert not run.path.exists()


def test_a_run_that_works_here_and_has_recorded_nothing_yet_is_not_sent_to_slurm(
    tmp_path: Path, cluster: FakeSlurm
) -> None:
    submit(tmp_path / "runs", cluster)
    run = RunDir(tmp_path / "runs" / "net")
    cluster.knows(state="CANCELLED")
    lock_fd = processes.take_lock(run.lock)
    assert lock_fd is not None

    there = submit(tmp_path / "runs", cluster)

    os.close(lock_fd)
    assert (there.state, there.backend, there.job_id) == ("running", "local", None)
    assert len(jobs_sent(cluster)) == 1


def test_a_run_that_goes_to_slurm_while_this_machine_waits_to_start_it_is_not_started_here(
    tmp_path: Path, cluster: FakeSlurm
) -> None:
    submit(tmp_path / "runs", cluster)
    run = RunDir(tmp_path / "runs" / "net")
    note = run.submission.read_text()
    run.submission.unlink()
    spec = RunSpec(name="net", runs_dir=str(tmp_path / "runs"))

    with ThreadPoolExecutor(1) as pool:
        with lock_submission(run, patience_s=0.0):
            waiting = pool.submit(local.submit, request_of(spec, cluster))
            opened = Path("/proc/self/fd")
            while not any(_leads_to(fd, run.submission_lock) for fd in list(opened.iterdir())[1:]):
                time.sleep(0.01)
            run.submission.write_text(note)
        found = waiting.result()

    assert (found.backend, found.state, found.job_id) == ("slurm", "waiting", "7")
    assert not run.attempts.exists()


def _leads_to(fd: Path, path: Path) -> bool:
    try:
        return fd.readlink() == path
    except FileNotFoundError:
        return False


def test_the_lock_is_free_after_a_submission_though_a_process_forked_meanwhile_has_inherited_it(
    tmp_path: Path, cluster: FakeSlurm
) -> None:
    submit(tmp_path / "runs", cluster)
    run = RunDir(tmp_path / "runs" / "net")

    with lock_submission(run, patience_s=0.0):
        child = os.fork()
        if child == 0:
            signal.pause()
    try:
        assert not processes.is_locked(run.submission_lock)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_link_in_the_place_of_the_lock_is_refused_and_makes_no_file(tmp_path: Path, cluster: FakeSlurm) -> None:
    submit(tmp_path / "runs", cluster)
    run = RunDir(tmp_path / "runs" / "net")
    run.submission.unlink()
    run.submission_lock.unlink()
    run.submission_lock.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(ConfigError, match="cannot be written"):
        submit(tmp_path / "runs", cluster)

    assert not (tmp_path / "elsewhere").exists()


def test_a_directory_that_others_may_write_to_is_refused_before_its_lock_is_opened(
    tmp_path: Path, cluster: FakeSlurm
) -> None:
    submit(tmp_path / "runs", cluster)
    run = RunDir(tmp_path / "runs" / "net")
    run.submission.unlink()
    run.submission_lock.unlink()
    run.path.chmod(0o777)

    with pytest.raises(ConfigError, match="Other users may write"):
        submit(tmp_path / "runs", cluster)

    assert not run.submission_lock.exists()


def test_a_lock_of_a_run_that_was_removed_and_made_anew_is_not_taken_for_the_new_ones(
    tmp_path: Path, cluster: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(tmp_path / "runs", cluster)
    run = RunDir(tmp_path / "runs" / "net")
    take_lock = processes.take_lock

    def removed_meanwhile(path: Path, *, patience_s: float = 0.0) -> int | None:
        lock_fd = take_lock(path, patience_s=patience_s)
        path.unlink()
        path.touch()
        return lock_fd

    monkeypatch.setattr(processes, "take_lock", removed_meanwhile)

    with pytest.raises(RunBusyError, match="missing now"), lock_submission(run, patience_s=0.0):
        pass


def test_a_file_system_that_numbers_files_anew_at_each_look_lets_a_run_be_submitted(
    tmp_path: Path, cluster: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(tmp_path / "runs", cluster)
    monkeypatch.setattr(os.path, "samestat", lambda *_: False)

    with lock_submission(RunDir(tmp_path / "runs" / "net"), patience_s=0.0):
        pass


def test_a_new_run_is_locked_from_the_moment_it_is_there_and_goes_where_it_is_not_started(
    tmp_path: Path, cluster: FakeSlurm
) -> None:
    request = request_of(RunSpec(name="net", runs_dir=str(tmp_path / "runs")), cluster)

    def interrupted(*, is_to_stay: bool) -> None:
        with lock_submission(request.run, patience_s=0.0) as claim:
            claim.write(request.resolved)
            claim.is_to_stay = is_to_stay
            assert (claim.is_new, processes.is_locked(request.run.submission_lock)) == (True, True)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted(is_to_stay=False)
    assert not request.run.path.exists()
    with pytest.raises(KeyboardInterrupt):
        interrupted(is_to_stay=True)
    assert request.run.config.exists()
    assert not processes.is_locked(request.run.submission_lock)


@pytest.mark.parametrize("is_new", [True, False], ids=["new", "again"])
def test_a_run_whose_answer_from_sbatch_was_lost_stays_and_its_job_is_found_again(
    is_new: bool, tmp_path: Path, cluster: FakeSlurm
) -> None:
    run = RunDir(tmp_path / "runs" / "net")
    if not is_new:
        submit(tmp_path / "runs", cluster)
        cluster.knows(state="CANCELLED")
    lost = "echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1"
    cluster.has("sbatch", f'[ "$1" = --test-only ] || {{ echo "$1" > {tmp_path}/sent; {lost}; }}')
    with pytest.raises(SlurmUnavailableError, match="asks Slurm first whether it has the job"):
        submit(tmp_path / "runs", cluster)
    sent = len(jobs_sent(cluster))
    assert run.config.exists()

    cluster.has("squeue", f"""printf '7\\0377\\036\\n8\\037%s\\036\\n' "$(cat {tmp_path}/sent)" """)
    cluster.knows(state="PENDING", reason="Priority")
    again = submit(tmp_path / "runs", cluster)

    assert (again.state, again.job_id, len(jobs_sent(cluster))) == ("waiting", "8", sent)
    assert "Job 8 of net still waits or runs" in str(slurm.why_in_use(run, cluster.environ))

    cluster.has(
        "squeue", f"""printf '7\\037%s\\036\\n' "$(cat {tmp_path}/sent)" """
    )  # it was cancelled, and is COMPLETING
    assert "Job 8 of net still waits or runs" in str(slurm.why_in_use(run, cluster.environ))


def test_a_run_that_slurm_refuses_goes_and_one_that_was_interrupted_stays(tmp_path: Path, cluster: FakeSlurm) -> None:
    run = RunDir(tmp_path / "runs" / "net")
    cluster.has("sbatch", '[ "$1" = --test-only ] || { echo "sbatch: error: Invalid qos" >&2; exit 1; }')
    with pytest.raises(ConfigError, match="Invalid qos"):
        submit(tmp_path / "runs", cluster)
    assert not run.path.exists()

    cluster.has("sbatch", '[ "$1" = --test-only ] || kill -INT $PPID')  # as Ctrl-C does while sbatch hangs
    with pytest.raises(KeyboardInterrupt):
        submit(tmp_path / "runs", cluster)
    assert run.config.exists()


@pytest.mark.parametrize("code", [None, "snapshots/old"])
def test_a_run_that_was_there_is_left_as_it_was_where_slurm_does_not_answer(
    code: str | None, tmp_path: Path, cluster: FakeSlurm
) -> None:
    submit(tmp_path / "runs", cluster)
    request = request_of(RunSpec(name="net", runs_dir=str(tmp_path / "runs")), cluster)
    run = request.run
    run.done.write_text("{}")
    if code is not None:
        run.snapshot.symlink_to(code)
    before = run.config.read_text()

    def unanswered() -> None:
        with lock_submission(run, patience_s=0.0) as claim:
            claim.write(request.resolved)
            run.snapshot.unlink(missing_ok=True)
            run.snapshot.symlink_to("snapshots/new")
            assert not run.done.exists()
            raise SlurmUnavailableError

    with pytest.raises(SlurmUnavailableError):
        unanswered()

    assert (run.config.read_text(), run.done.exists()) == (before, True)
    assert (str(run.snapshot.readlink()) if run.snapshot.is_symlink() else None) == code
