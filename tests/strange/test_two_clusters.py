"""Two Slurm clusters that share a file system: on a login node of the one, nothing is done to a run whose job the other has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddp_hpc.base.durable import append_json_line
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cli import main
from ddp_hpc.launch.submission import slurm
from ddp_hpc.launch.sweep.chain import sweep_dependency
from ddp_hpc.launch.sweep.manage_sweep import cancel_sweep, continue_sweep, delete_sweep
from ddp_hpc.launch.sweep.sweep_dir import read_sweep
from ddp_hpc.run.run_dir.ledger import End, Ending, record_end
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import QueuedJob, read_queued_job, write_queued_job
from tests.made_run import make_run
from tests.unit.test_sweep_array import Lab, start


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """Return a login node of the cluster `beta`, whose Slurm knows no job."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ddp_hpc.launch.submission.submit_checks.capacity.NODE_LOCAL_DIRS", ())
    made = Lab(tmp_path)
    belongs_to(made, "beta")
    monkeypatch.setenv("PATH", made.environ["PATH"] + os.pathsep + os.environ["PATH"])
    return made


def belongs_to(lab: Lab, cluster: str) -> None:
    slurm._cluster_names.clear()
    lab.has(
        "scontrol",
        f'case "$*" in *config*) echo "MaxArraySize = 1001"; echo "ClusterName = {cluster}";; '
        "*show*job*) echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1;; esac",
    )


def run_on_alpha(runs_dir: Path) -> RunDir:
    """Make a run that works on a node of the cluster `alpha`."""
    run = make_run(runs_dir)
    write_queued_job(run, QueuedJob(job_id="7", attempt=0, at=1.0, slurm_cluster="alpha"))
    begun = {"attempt": 0, "job_id": "7", "host": "node1", "pid": 1, "started_at": 1.0, "cluster": "slurm"}
    append_json_line(run.attempts, begun)
    return run


@pytest.mark.parametrize("verb", ["delete --yes", "cancel"])
def test_a_run_that_works_on_the_other_cluster_is_neither_deleted_nor_cancelled(
    verb: str, lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_on_alpha(tmp_path / "runs")
    command, *options = verb.split()

    assert main([command, str(run.path), *options]) == 2

    said = capsys.readouterr().err
    assert "job 7 of the Slurm cluster alpha, but this host belongs to the cluster beta" in said
    assert "Run the command on a login node of alpha." in said
    assert run.config.exists()
    assert not lab.orders("scancel")


def test_it_is_not_submitted_twice(lab: Lab, tmp_path: Path) -> None:
    run = run_on_alpha(tmp_path / "runs")

    with pytest.raises(ConfigError, match="this host belongs to the cluster beta"):
        slurm.find_job(run, lab.environ)
    belongs_to(lab, "alpha")
    assert slurm.find_job(run, lab.environ) is None  # its own Slurm says that the job is gone


def test_a_run_that_has_ended_there_is_used_here_and_its_number_names_no_job_of_this_cluster(
    lab: Lab, tmp_path: Path
) -> None:
    run = run_on_alpha(tmp_path / "runs")
    record_end(run, 0, End(ending=Ending.FINISHED, exit_code=0))
    slurm._cluster_names.clear()
    lab.has(
        "scontrol",
        'case "$*" in *config*) echo "ClusterName = beta";; *) echo "JobId=7 JobName=x UserId=ada(1) JobState=RUNNING Reason=None Command=x";; esac',
    )

    assert slurm.find_job(run, lab.environ) is None
    assert main(["delete", str(run.path), "--yes"]) == 0
    assert not run.path.exists()


def test_a_record_without_a_cluster_is_judged_by_the_slurm_that_is_here(lab: Lab, tmp_path: Path) -> None:
    run = run_on_alpha(tmp_path / "runs")
    write_queued_job(run, QueuedJob(job_id="7", attempt=0, at=1.0))

    assert slurm.find_job(run, lab.environ) is None


def test_points_of_a_sweep_that_run_on_the_other_cluster_are_neither_sent_again_nor_deleted(
    lab: Lab, tmp_path: Path
) -> None:
    sweep_dir = start(lab, tmp_path, "seed=0..1").sweep_dir
    for point in read_sweep(sweep_dir).points:
        run = sweep_dir.run(point)
        run.path.mkdir()
        run.config.write_text(f"name: {run.name}\n")
        write_queued_job(run, QueuedJob(job_id="7", attempt=0, at=1.0, slurm_cluster="alpha"))
        append_json_line(run.attempts, {"attempt": 0, "job_id": "7", "host": "node1", "pid": 1, "started_at": 1.0})

    with pytest.raises(ConfigError, match="login node of alpha"):
        continue_sweep(sweep_dir, lab.environ, limits={})
    with pytest.raises(ConfigError, match="login node of alpha"):
        delete_sweep(sweep_dir, lab.environ)

    assert len(lab.arrays) == 1
    assert sweep_dir.path.exists()


def test_a_sweep_whose_arrays_wait_on_the_other_cluster_is_neither_sent_again_nor_deleted_nor_cancelled(
    lab: Lab, tmp_path: Path
) -> None:
    belongs_to(lab, "alpha")
    sweep_dir = start(lab, tmp_path, "seed=0..1").sweep_dir
    belongs_to(lab, "beta")

    for give in (
        lambda: continue_sweep(sweep_dir, lab.environ, limits={}),
        lambda: delete_sweep(sweep_dir, lab.environ),
        lambda: cancel_sweep(sweep_dir, lab.environ),
        lambda: sweep_dependency(sweep_dir, "any", lab.environ),
    ):
        with pytest.raises(ConfigError, match="grid was submitted as job 14 of the Slurm cluster alpha"):
            give()

    assert (len(lab.arrays), lab.orders("scancel"), read_sweep(sweep_dir).is_cancelled) == (1, [], True)
    belongs_to(lab, "alpha")
    delete_sweep(sweep_dir, lab.environ)


def test_a_submission_records_the_cluster(lab: Lab, tmp_path: Path) -> None:
    Path("train.py").touch()
    lab.has("sbatch", 'if [ "$1" = --test-only ]; then exit 0; fi; echo "Submitted batch job 11"')

    main(["submit", "name=one", "--cluster", "slurm", "--", "python", "train.py"])

    queued = read_queued_job(RunDir(tmp_path / "runs" / "one"))
    assert queued is not None
    assert (queued.job_id, queued.slurm_cluster) == ("11", "beta")
