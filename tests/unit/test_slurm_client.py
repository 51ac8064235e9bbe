"""Slurm's commands are run in a clean environment, and what they refuse is told. Slurm is made of shell scripts here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ddp_hpc.base.errors import ConfigError, SlurmRefusalError, SlurmUnavailableError
from ddp_hpc.cluster.slurm import client

NO_CONTACT = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
NO_CLUSTER = (
    "scontrol: error: fetch_config: DNS SRV lookup failed\nscontrol: fatal: Could not establish a configuration source"
)

CONFIGLESS_DOWN = (
    "scontrol: error: _fetch_child: failed to fetch remote configs: Unable to contact slurm controller (connect failure)\n"
    "scontrol: fatal: Could not establish a configuration source"
)
"""What Slurm 22.05 prints on a host without slurm.conf while the controller is down."""

Slurm = Callable[..., Mapping[str, str]]


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    """Return a way to make commands of shell text; it returns an environment that finds them."""

    def make(**commands: str) -> Mapping[str, str]:
        for name, text in commands.items():
            path = tmp_path / name
            path.write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
            path.chmod(0o755)
        return {"PATH": f"{tmp_path}:/usr/bin:/bin"}

    return make


def failing(said: str) -> str:
    return f"echo '{said}' >&2; exit 1"


def test_what_a_job_around_us_left_is_dropped() -> None:
    environ = {
        "HOME": "/home/ada",
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_CONF_SERVER": "head",
        "SLURM_JWT": "token",
        "SLURM_SACK_SOCKET": "/run/sack",
        "SLURM_JOB_ID": "7",
        "SLURMD_NODENAME": "node1",
        "SBATCH_PARTITION": "gpu",
        "SRUN_DEBUG": "3",
        "SQUEUE_FORMAT": "%i",
        "SACCT_FORMAT": "jobid",
        "PMI_RANK": "0",
        "PMIX_RANK": "0",
        "PMIRROR": "kept",
    }

    clean = client.clean_environ(environ)

    kept = {"HOME", "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_SACK_SOCKET", "PMIRROR"}
    added = {"SLURM_TIME_FORMAT": "standard", "SLURM_BITSTR_LEN": "0"}
    assert clean == {name: environ[name] for name in kept} | added
    assert client.inherited_names(environ) == sorted(environ.keys() - kept)
    assert client.without_inherited_argv({"SLURM_JOB_ID": "7", "HOME": "/"}) == ["env", "--unset=SLURM_JOB_ID"]


def test_a_command_sees_the_clean_environment(slurm: Slurm) -> None:
    environ = {**slurm(sinfo="env; cat"), "SLURM_JOB_ID": "7", "SLURM_CONF": "/etc/slurm.conf"}

    answer = client.ask(["sinfo"], environ)

    assert answer.returncode == 0
    assert "SLURM_CONF=/etc/slurm.conf" in answer.stdout
    assert "SLURM_JOB_ID" not in answer.stdout


def test_a_missing_command_is_told_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`sbatch`, but PATH on this host has none. Go to a login node"):
        client.estimate_start(Path("job.sh"), {"PATH": str(tmp_path)})


def test_without_a_path_nothing_is_found() -> None:
    assert not client.is_here({})


@pytest.mark.parametrize(
    "said",
    [
        NO_CONTACT,
        CONFIGLESS_DOWN,
        "slurm_load_jobs error: Socket timed out on send/recv operation",
        "sacct: error: Problem talking to the database: Connection refused",
    ],
)
def test_a_slurm_that_is_down_is_told_apart_from_a_refusal(slurm: Slurm, said: str) -> None:
    environ = slurm(squeue=failing(said), sbatch=failing(said), scancel=failing(said))

    for ask in (
        lambda: client.queue(environ),
        lambda: client.estimate_start(Path("job.sh"), environ),
        lambda: client.cancel("7", environ),
    ):
        with pytest.raises(SlurmUnavailableError, match="does not answer"):
            ask()


def test_a_slurm_that_says_nothing_is_not_waited_for(slurm: Slurm) -> None:
    environ = slurm(squeue="exec sleep 60")

    with pytest.raises(SlurmUnavailableError, match="did not end"):
        client.ask(["squeue"], environ, timeout_s=0.05)


def test_commands_without_a_cluster_are_told_with_what_is_missing(slurm: Slurm) -> None:
    environ = slurm(scontrol=failing(NO_CLUSTER), sbatch="")

    assert not client.is_here(environ)
    with pytest.raises(ConfigError, match="Could not establish a configuration source"):
        client.config(environ)


@pytest.mark.parametrize(("after", "newest"), [([], "60"), (["5_90"], "60"), (["60"], None), (["61_0"], None)])
def test_the_newest_job_of_a_script_is_after_others_of_which_some_are_tasks_of_arrays(
    after: list[str], newest: str | None, slurm: Slurm, tmp_path: Path
) -> None:
    environ = slurm(squeue=f"printf '4\\037{tmp_path}/job.sbatch\\036\\n60\\037{tmp_path}/job.sbatch\\036\\n'")

    assert client.newest_job_of_script(tmp_path, "/job.sbatch", environ, after=after) == newest


def test_a_cluster_that_does_not_answer_is_here(slurm: Slurm) -> None:
    assert client.is_here(slurm(scontrol="echo 'Slurmctld(primary) at head is DOWN'; exit 1", sbatch=""))
    assert client.is_here(slurm(scontrol=failing(CONFIGLESS_DOWN)))


def test_a_host_with_sbatch_alone_is_one_of_a_cluster_and_the_rest_is_told_to_be_missing(
    slurm: Slurm, tmp_path: Path
) -> None:
    slurm(sbatch="")
    environ = {"PATH": str(tmp_path)}

    assert client.is_here(environ)
    with pytest.raises(ConfigError, match=r"`scontrol`, but PATH on this host has none"):
        client.config(environ)


def test_a_question_that_fails_has_no_answer(slurm: Slurm) -> None:
    environ = slurm(scontrol=failing("a word of the site"), squeue=failing("squeue: error: Invalid user: ada"))

    for ask in (client.config, client.partitions, lambda environ: client.job("7", environ)):
        with pytest.raises(SlurmUnavailableError, match="a word of the site"):
            ask(environ)
    with pytest.raises(SlurmUnavailableError, match="Invalid user"):
        client.queue(environ)


@pytest.mark.parametrize(
    "said",
    ["slurm_load_jobs error: Invalid job id specified", "Job 14_3 not found"],
    ids=["a job", "a task of an array whose other tasks live"],
)
@pytest.mark.parametrize("stream", [1, 2])
def test_a_job_that_the_controller_forgot_is_looked_up_in_the_database(said: str, stream: int, slurm: Slurm) -> None:
    row = "7|NODE_FAIL|2026-11-21T07:00:00|2026-11-21T07:10:00|10:00|node1|None"
    again = row.replace("NODE_FAIL", "COMPLETED").replace("T07", "T08")
    environ = slurm(
        scontrol=f"echo '{said}' >&{stream}; exit 1",
        sacct=f"printf '%s\\n' '{again}' '{row}' | tr '|' '\\037'",
    )

    job = client.job("7", environ)

    assert job is not None
    assert job.state == "COMPLETED"
    assert [start.state for start in client.accounting(["7"], environ)] == ["NODE_FAIL", "COMPLETED"]


def test_a_job_that_both_have_forgotten_is_none(slurm: Slurm) -> None:
    environ = slurm(
        scontrol=failing("slurm_load_jobs error: Invalid job id specified"),
        sacct=failing("Slurm accounting storage is disabled"),
    )

    assert client.job("7", environ) is None


def test_an_answer_that_holds_no_job_and_no_refusal_is_not_taken_for_a_job_that_is_gone(slurm: Slurm) -> None:
    environ = slurm(scontrol="echo 'NOTE: maintenance on Monday | all partitions'", sacct="echo 'NOTE: the same'")

    with pytest.raises(SlurmUnavailableError, match="does not say whether it knows job 42"):
        client.job("42", environ)


def test_a_refused_job_is_told_in_slurms_words(slurm: Slurm) -> None:
    environ = slurm(sbatch=failing("allocation failure: Invalid partition name specified"))

    assert (
        client.estimate_start(Path("job.sh"), environ).refusal == "allocation failure: Invalid partition name specified"
    )


def test_a_refused_cancel_is_told(slurm: Slurm) -> None:
    environ = slurm(scancel=failing("scancel: error: Kill job error on job id 7: Access/permission denied"))

    with pytest.raises(SlurmRefusalError, match="permission denied") as refused:
        client.cancel("7", environ)

    assert (refused.value.code, refused.value.exit_code) == ("ESLURM_ACCESS_DENIED", 2)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (lambda environ: client.requeue("8_3", environ), "scontrol requeue 8_3"),
        (lambda environ: client.release("7", environ), "scontrol release 7"),
        (lambda environ: client.update("7", environ, StartTime="now"), "scontrol update JobId=7 StartTime=now"),
        (
            lambda environ: client.update("7", environ, ExcNodeList="node[1-2],node4"),
            "scontrol update JobId=7 ExcNodeList=node[1-2],node4",
        ),
        (lambda environ: client.cancel("7", environ), "scancel 7"),
        (lambda environ: client.cancel_pending("7", environ), "scancel --state=PENDING 7"),
        (lambda environ: client.signal("7", "USR2", environ), "scancel --signal=USR2 7"),
        (lambda environ: client.signal("7", "TERM", environ, batch_only=True), "scancel --signal=TERM --batch 7"),
        (lambda environ: client.estimate_start(Path("/a/job.sh"), environ), "sbatch --test-only /a/job.sh"),
        (lambda environ: client.submit(Path("/a/job.sh"), environ), "sbatch --parsable /a/job.sh"),
        (
            lambda environ: client.submit(Path("job.sh"), environ, ["--dependency=afterany:7", "--exclude=node1"]),
            "sbatch --parsable --dependency=afterany:7 --exclude=node1 job.sh",
        ),
    ],
)
def test_orders_are_in_slurms_words(
    slurm: Slurm, tmp_path: Path, order: Callable[[Mapping[str, str]], object], words: str
) -> None:
    said = f'echo "${{0##*/}} $*" >{tmp_path}/order; echo 12'

    order(slurm(scontrol=said, scancel=said, sbatch=said))

    assert (tmp_path / "order").read_text() == f"{words}\n"
