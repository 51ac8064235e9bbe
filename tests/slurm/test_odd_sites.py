"""Sites whose Slurm counts GPUs in other ways, whose modules take Slurm away, and what plain sbatch says of a job."""

from __future__ import annotations

import pytest

from ddp_hpc.run.run_dir.records import read_queued_job
from tests.slurm.faulty_runs import FAULTY, attempts, await_done, await_step, slow_file
from tests.slurm.runs import LoginNode, world

pytestmark = pytest.mark.long

OUTER = {"SLURM_GPUS": "9", "SLURM_GPUS_PER_NODE": "9", "SLURM_GPUS_PER_TASK": "9"}


def test_an_outer_jobs_gpus_and_a_purge_of_slurms_commands_do_not_end_a_run(place: LoginNode) -> None:
    place.submit("purged", *FAULTY, *world(2, 1), 'slurm.setup=["PATH=/nowhere"]')
    place.cluster.cancel_all()

    place.cluster.run("sbatch", place.run("purged").job_script, cwd=place.folder, env=OUTER)
    await_done(place, "purged")

    assert attempts(place, "purged")[-1].ending == "finished", place.console("purged")


def test_a_successor_stays_where_plain_sbatch_put_the_job(place: LoginNode) -> None:
    slow = f"recipe.args.slow_while={slow_file(place)}"
    place.submit("placed", *FAULTY, *world(2, 1), slow, "restart.by=successor", "slurm.partition=low")
    place.cluster.cancel_all()
    place.cluster.run("sbatch", "--partition=high", "--time=33", place.run("placed").job_script, cwd=place.folder)
    await_step(place, "placed")
    first = read_queued_job(place.run("placed"))

    assert place.type("requeue", "placed").returncode == 0
    place.cluster.wait_for(lambda: read_queued_job(place.run("placed")) != first, 60)

    now = read_queued_job(place.run("placed"))
    assert now is not None
    said = place.cluster.run("scontrol", "show", "job", now.job_id).stdout
    assert "Partition=high" in said, said
    assert "TimeLimit=00:33:00" in said, said
