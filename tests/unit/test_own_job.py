"""A shell keeps the variables of a job that has ended: all commands ask the same question about them, and say the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_hpc.cluster.slurm.own_job import SHELL_ADVICE, without_ended_job
from tests.unit.made_network import task

JOB = "echo JobId=7 JobName=x UserId=ada\\(1\\) JobState={state} Reason=None Restarts=0 NodeList={nodes} Command=x"
NO_JOB = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
SHELL = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_CLUSTER_NAME": "lab",
    "SLURM_CONF": "/etc/slurm/slurm.conf",
}


def slurm(folder: Path, answer: str, cluster: str = "lab") -> dict[str, str]:
    """Return an environment with a scontrol that answers so about a job, and writes down that it was asked."""
    path = folder / "scontrol"
    config = f"'show config') echo 'ClusterName = {cluster}';;"
    path.write_text(f'#!/bin/sh\ntouch {folder}/asked\ncase "$*" in {config} *) {answer};; esac\n', encoding="utf-8")
    path.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(folder)}


@pytest.mark.parametrize(
    ("answer", "cluster", "said"),
    [
        (JOB.format(state="RUNNING", nodes="node[1-2]"), "lab", ""),
        (JOB.format(state="COMPLETED", nodes="node[1-2]"), "lab", "name job 7, which completed"),
        (JOB.format(state="RUNNING", nodes="node1"), "lab", ""),  # it lost node2 (`--no-kill`), or gave it back
        (JOB.format(state="CONFIGURING", nodes="node[1-2]"), "lab", ""),  # its nodes boot
        (JOB.format(state="CONFIGURING", nodes=""), "lab", ""),
        (JOB.format(state="PENDING", nodes=""), "lab", "name job 7, which waits"),
        (JOB.format(state="RUNNING", nodes="node[2-3]"), "lab", "name job 7, which runs on node[2-3]"),
        (JOB.format(state="RUNNING", nodes="node[3-4]"), "lab", "name job 7, which runs on node[3-4]"),
        (NO_JOB, "lab", "name job 7, but Slurm knows no such job"),
        (NO_JOB, "other", ""),  # another cluster of the site answers here
        ("echo 'Unable to contact slurm controller' >&2; exit 1", "lab", ""),
        ("exit 1", "lab", ""),
    ],
)
def test_variables_are_dropped_only_where_slurm_says_that_their_job_does_not_run(
    tmp_path: Path, answer: str, cluster: str, said: str
) -> None:
    environ = {**slurm(tmp_path, answer, cluster), **SHELL}

    left, note = without_ended_job(environ)

    kept = {name for name in left if name.startswith("SLURM_")}
    assert kept == ({"SLURM_CONF"} if said else {*SHELL})
    assert said in note
    assert (SHELL_ADVICE in note) == bool(said)


def test_each_of_many_tasks_does_not_ask_the_controller(tmp_path: Path) -> None:
    environ = {**slurm(tmp_path, NO_JOB), **task(3, 0, 1, on="node1")}

    assert without_ended_job(environ) == (environ, "")
    assert not (tmp_path / "asked").exists()


def test_a_host_without_slurms_commands_keeps_the_variables() -> None:
    """As in a container of a job."""
    environ = {"PATH": "/nowhere", **SHELL}

    assert without_ended_job(environ) == (environ, "")


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("env", "--json"), 0),
        (("join", "name=x", "--", "true"), 2),  # no launcher has started this process
        (("certify", "--faults=none-such", "--", "true"), 2),
    ],
)
def test_each_command_says_that_it_ignores_the_variables(tmp_path: Path, words: tuple[str, ...], code: int) -> None:
    environ = {**slurm(tmp_path, NO_JOB), **SHELL}

    done = subprocess.run(
        [sys.executable, "-m", "ddp_hpc", *words],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == code, done.stderr
    said = f"note: the Slurm variables of this shell name job 7, but Slurm knows no such job; {SHELL_ADVICE}"
    assert said in done.stderr + done.stdout
    if words[0] == "env":
        assert json.loads(done.stdout)["process"] == "no Slurm job: a single process"
