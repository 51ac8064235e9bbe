"""The supervisor's own end, where it cannot even begin."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.base import exit_codes, processes
from ddp_hpc.cluster.slurm.allocation import read_allocation
from ddp_hpc.job import attempt, attempt_start, supervisor
from ddp_hpc.job.ending import takeover
from ddp_hpc.job.ending.attempt_end import Conclusion
from ddp_hpc.job.job_context import Outcome
from ddp_hpc.job.slurm_job import SlurmJob
from ddp_hpc.run.run_dir import ownership
from ddp_hpc.run.run_dir.ledger import Cause, End, Ending, Ledger, Next, record_end, record_start
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import QueuedJob, ask_to_stop, write_queued_job
from ddp_hpc.run.spec import RunSpec
from ddp_hpc.run.workload.recipe import RecipeWorkload
from tests.made_run import add_checkpoint, make_run
from tests.unit.fake_slurm import FakeSlurm
from tests.unit.held_signals import signals_held_back
from tests.unit.made_network import batch


def test_a_disk_without_room_for_an_attempt_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def claim(run: RunDir, attempt: int) -> list[str]:
        raise OSError(errno.ENOSPC, "No space left on device", str(run.checkpoints))

    monkeypatch.setattr(ownership, "claim_run", claim)
    run = make_run(tmp_path)

    with signals_held_back():
        code = supervisor.main([str(run.path)])

    said = capsys.readouterr().err
    assert code == exit_codes.FAILED
    assert "No space left on device" in said
    assert "submit digits again" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(("words", "heard"), [([], "None"), (["--stop-requested"], "SIGUSR2"), (["--told"], "SIGUSR2")])
def test_a_supervisor_that_was_told_before_it_could_listen_hears_it(
    tmp_path: Path, words: list[str], heard: str
) -> None:
    run = make_run(tmp_path)
    run.config.write_text("name: [")  # so far, and no further
    script = (
        "import sys; from ddp_hpc.job import supervisor; from ddp_hpc.base.processes import await_signal;"
        "code = supervisor.main(sys.argv[1:]); number = await_signal(0.0); print(code, number and number.name)"
    )

    done = subprocess.run(
        [sys.executable, "-c", script, str(run.path), *words], capture_output=True, text=True, check=False
    )

    assert done.stdout == f"{exit_codes.REFUSED} {heard}\n", done.stderr


# --- a job that is back ----------------------------------------------------------------------------------------------


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Return a Slurm in whose job on two nodes this process is."""
    slurm = FakeSlurm(tmp_path)
    slurm.knows()
    slurm.knows_nodes(node1="mixed", node2="mixed", node3="idle", node4="idle")
    environ = {**batch("node[1-2]", "1(x2)"), **slurm.environ, "SLURM_JOB_ID": "7"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return slurm


def has_trained(run: RunDir, *, since: int = 0, **more: Any) -> None:
    """Have attempt 0 of a submission commit a checkpoint and go back into the queue."""
    record_start(run, attempt=0, job_id="7", cluster="slurm", nodes=("node1", "node2"))
    add_checkpoint(run, 4)
    end = End(ending=Ending.STOPPED, exit_code=exit_codes.STOPPED, cause=Cause.PREEMPTED, last_step=4, next=Next.SLURM)
    record_end(run, 0, end)
    write_queued_job(run, QueuedJob(job_id="7", attempt=1, at=0.0, since=since, **more))


def supervise(run: RunDir, *words: str) -> int:
    with signals_held_back():
        return supervisor.main([str(run.path), "--cluster", "slurm", *words])


def test_a_node_that_lacks_what_the_others_had_is_left_for_another(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = make_run(tmp_path)
    run.config.write_text(f"name: digits\nresources: {{nodes: 2}}\ncontainer: {{image: {tmp_path}/gone.sif}}\n")
    has_trained(run)

    code = supervise(run)

    last = Ledger.read(run).attempts[-1]
    assert code == exit_codes.FAILED
    assert (last.cause, last.next, last.failed_nodes) == ("node failed", "requeue", ("node1",))
    assert "gone.sif, but there is no such file" in last.reason
    assert slurm.orders("scontrol requeue") == ["scontrol requeue 7"]
    assert slurm.orders("scontrol update") == ["scontrol update JobId=7 ExcNodeList=node1"]


def test_an_image_that_no_attempt_has_seen_ends_the_run(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = make_run(tmp_path)
    run.config.write_text(f"name: digits\nresources: {{nodes: 2}}\ncontainer: {{image: {tmp_path}/gone.sif}}\n")

    code = supervise(run)

    assert code == exit_codes.REFUSED
    assert [(one.ending, one.cause) for one in Ledger.read(run).attempts] == [("refused", "refused")]
    assert slurm.orders() == []


@pytest.mark.parametrize(
    ("said", "ending", "cause"), [("stop", "stopped", "stop asked"), ("cancel", "cancelled", "cancelled")]
)
def test_what_the_user_said_while_a_job_was_on_its_way_back_holds(
    said: str, ending: str, cause: str, tmp_path: Path, slurm: FakeSlurm
) -> None:
    run = make_run(tmp_path)
    has_trained(run, cancelled_at=1.0 if said == "cancel" else None)
    if said == "stop":
        ask_to_stop(run)

    supervise(run)

    last = Ledger.read(run).attempts[-1]
    assert (last.attempt, last.ending, last.cause, last.next) == (1, ending, cause, "")
    assert not run.stop_request.exists()  # heeded once: who requeues the job by hand now wants it to go on
    assert slurm.orders() == []


@pytest.mark.parametrize("job", ["of a new submission", "of nobody's"])
def test_what_the_user_said_of_an_earlier_job_is_over(job: str, tmp_path: Path, slurm: FakeSlurm) -> None:
    run = make_run(tmp_path)
    run.config.write_text(f"name: digits\nresources: {{nodes: 2}}\ncontainer: {{image: {tmp_path}/gone.sif}}\n")
    has_trained(run, since=1)
    if job == "of nobody's":
        write_queued_job(run, QueuedJob(job_id="6", attempt=0, at=0.0, cancelled_at=1.0))
    ask_to_stop(run)

    supervise(run)

    assert not run.stop_request.exists()
    assert "gone.sif" in Ledger.read(run).attempts[-1].reason  # so far it came


@pytest.mark.parametrize(("num_lost", "begins"), [(2, True), (3, False)])
def test_a_run_whose_nodes_fail_again_and_again_ends_though_slurm_requeues_it_without_a_limit(
    num_lost: int, begins: bool, tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    run.config.write_text("name: digits\nresources: {nodes: 2}\nrestart: {max_no_progress: 3}\n")
    slurm.accounts(*["NODE_FAIL"] * num_lost)
    for number in range(num_lost):
        record_start(run, attempt=number, job_id="7", cluster="slurm", nodes=("node1", "node2"), restart=number)
        if number < num_lost - 1:  # the newest one's supervisor died with its node
            end = End(
                ending=Ending.FAILED, exit_code=-9, cause=Cause.NODE_FAILED, next=Next.SLURM, failed_nodes=("node1",)
            )
            record_end(run, number, end)
    write_queued_job(run, QueuedJob(job_id="7", attempt=0, at=0.0))
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(num_lost))
    began: list[int] = []

    def run_attempt(*_: object) -> Conclusion:
        began.append(num_lost)
        return Conclusion(attempt=num_lost, end=End(ending=Ending.FAILED, exit_code=exit_codes.FAILED))

    monkeypatch.setattr(supervisor, "run_attempt", run_attempt)

    assert supervise(run) == exit_codes.FAILED

    last = Ledger.read(run).attempts[-1]
    assert bool(began) == begins
    assert begins or (last.attempt, last.cause, last.next) == (3, "node failed", "")
    assert begins or last.reason.startswith(
        "3 attempts in a row ended without a new checkpoint, so the run ends (`restart.max_no_progress`)"
    )


@pytest.mark.parametrize("words", [(), ("--guarded", "--after=137")], ids=["itself", "one that follows a dead one"])
def test_a_start_of_a_job_that_slurm_had_lost_leaves_the_run_to_the_newer_start(
    words: tuple[str, ...], tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    run.config.write_text("name: digits\nresources: {nodes: 2}\n")
    record_start(run, attempt=0, job_id="7", cluster="slurm", nodes=("node1", "node2"))
    record_end(run, 0, End(ending=Ending.FAILED, exit_code=1, cause=Cause.WORKER_CRASHED, next=Next.IN_PLACE))
    record_start(run, attempt=1, job_id="7", cluster="slurm", nodes=("node3", "node4"), restart=1, host="node3")
    slurm.has("squeue", "echo 7.0")

    assert supervise(run, *words) == exit_codes.FENCED

    assert "Slurm has started job 7 of digits again, on node3" in capsys.readouterr().err
    assert Ledger.read(run).newest_number == 1
    assert slurm.orders("scancel") == []


def test_a_stop_request_that_cannot_be_read_for_a_moment_stays_and_one_of_the_supervisor_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    workload = RecipeWorkload(RunSpec(name="digits"))
    run.stop_request.write_text('{"by": "user", "then": "end"}')

    def stale(path: Path) -> None:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(attempt_start, "read_json", stale)
        attempt_start.begin_attempt(run, workload, None)
    assert run.stop_request.exists()

    ask_to_stop(run, by="supervisor")
    attempt_start.begin_attempt(run, workload, None)
    assert not run.stop_request.exists()


# --- one that follows a dead one -------------------------------------------------------------------------------------


def begun(run: RunDir, attempt: int = 0, *, next_: Next | None = None, exit_code: int = 0) -> None:
    """Have job 7 begin an attempt; `next_` is what its supervisor decided, if it lived as long."""
    record_start(run, attempt=attempt, job_id="7", cluster="slurm", nodes=("node1", "node2"))
    write_queued_job(run, QueuedJob(job_id="7", attempt=0, at=0.0))
    if next_ is not None:
        end = End(ending=Ending.STOPPED, exit_code=exit_code, reason="preempted", cause=Cause.PREEMPTED, next=next_)
        record_end(run, attempt, end)


def test_supervisors_that_die_without_a_new_checkpoint_end_the_run_with_the_reason(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    run = make_run(tmp_path)
    run.config.write_text("name: digits\nresources: {nodes: 2}\nrestart: {max_no_progress: 1}\n")
    begun(run)

    code = supervise(run, "--guarded", "--after=137")

    (last,) = Ledger.read(run).attempts
    assert code == exit_codes.GAVE_UP
    assert (last.ending, last.cause, last.next) == ("failed", "supervisor died", "")
    assert last.reason.startswith(
        "ddp-hpc's supervisor process was killed by signal 9 (SIGKILL); 1 attempt ended without"
    )
    assert slurm.orders() == []


@pytest.mark.parametrize(("next_", "orders"), [("requeue", ["scontrol requeue 7"]), ("", []), ("slurm", [])])
def test_what_a_dead_supervisor_has_decided_is_done(
    next_: Next, orders: list[str], tmp_path: Path, slurm: FakeSlurm
) -> None:
    run = make_run(tmp_path)
    run.config.write_text("name: digits\nresources: {nodes: 2}\n")
    begun(run, next_=next_, exit_code=exit_codes.STOPPED)

    code = supervise(run, "--guarded", "--after=137")

    assert code == exit_codes.STOPPED
    assert slurm.orders() == orders
    assert len(Ledger.read(run).attempts) == 1


@pytest.mark.parametrize("is_held", [True, False], ids=["srun lives", "srun was killed, too"])
def test_steps_that_a_dead_supervisor_has_left_are_cancelled(
    is_held: bool, tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takeover, "EXIT_TIMEOUT_S", 0.0)
    run = make_run(tmp_path)
    slurm.has("squeue", "echo 7.0; echo 7.batch; echo 7.extern; echo 7.12")
    holder = processes.take_lock(run.lock) if is_held else None
    slurm.has("scancel", f"touch {tmp_path}/cancelled")
    monkeypatch.setattr(takeover, "CANCEL_TIMEOUT_S", 0.1)

    allocation = read_allocation(os.environ)
    assert allocation is not None
    takeover.end_leftover_steps(run, SlurmJob(allocation=allocation, environ=os.environ))

    if holder is not None:
        os.close(holder)
    assert slurm.orders("scancel") == ["scancel 7.0", "scancel 7.12"]


# --- errors of ours, and of the disk -----------------------------------------------------------------------------------


def test_an_error_that_nothing_was_meant_for_is_in_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def watch_over(*_: object) -> Outcome:
        raise KeyError("odd")

    monkeypatch.setattr(attempt, "_wait_for_workers", watch_over)
    run = make_run(tmp_path)

    with signals_held_back():
        code = supervisor.main([str(run.path)])

    (last,) = Ledger.read(run).attempts
    assert (code, last.ending, last.reason) == (
        exit_codes.FAILED,
        "failed",
        "ddp-hpc's own supervisor process failed: KeyError: 'odd' (traceback in the job's log)",
    )
    assert "Traceback" in capsys.readouterr().err  # for whoever mends it


def test_an_error_before_the_first_attempt_is_in_the_ledger_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm: FakeSlurm
) -> None:
    def stage(*_: object) -> None:
        raise KeyError("odd")

    monkeypatch.setattr(supervisor, "stage", stage)
    run = make_run(tmp_path)

    code = supervise(run, "--guarded")

    (last,) = Ledger.read(run).attempts
    assert (code, last.ending, last.next) == (
        exit_codes.RESTART_SUPERVISOR,
        "failed",
        "in place",
    )  # the guardian starts another
    assert last.reason == "ddp-hpc's own supervisor process failed: KeyError: 'odd' (traceback in the job's log)"


@pytest.mark.parametrize(
    ("number", "words", "code"),
    [
        (errno.EIO, ["--cluster", "slurm"], exit_codes.RESTART_SUPERVISOR),
        (errno.ENOSPC, ["--cluster", "slurm"], exit_codes.RESTART_SUPERVISOR),
        (errno.ESTALE, [], exit_codes.RESTART_SUPERVISOR),
        (errno.ENOSPC, [], exit_codes.GAVE_UP),
    ],
)
def test_a_disk_error_while_the_run_is_claimed_leaves_the_decision_to_another_supervisor(
    number: int, words: list[str], *, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm: FakeSlurm
) -> None:
    def claim(run: RunDir, attempt: int) -> list[str]:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(ownership, "claim_run", claim)
    run = make_run(tmp_path)

    with signals_held_back():
        assert supervisor.main([str(run.path), *words, "--guarded"]) == code


def test_a_full_disk_of_the_node_is_not_called_the_run_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    def stage(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/unpacked")

    monkeypatch.setattr(supervisor, "stage", stage)

    with signals_held_back():
        code = supervise(make_run(tmp_path), "--guarded")

    assert code == exit_codes.RESTART_SUPERVISOR
    said = f"error: ddp-hpc cannot use /tmp/unpacked on {socket.gethostname()}: [Errno 28] No space left on device"
    assert said in capsys.readouterr().err
