"""What `ddp-hpc env` shows in a rank is what the rank has, by every launcher."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from ddp_hpc.cluster.rendezvous.worker_env import (
    CPUS_BEFORE,
    GIVEN_VARIABLE,
    PROBE_FOLDER,
    PROBES_ITSELF,
    TABLE_VARIABLE,
    USERS_CODE,
)
from tests.slurm.cluster import USER, Cluster
from tests.slurm.lab.settings import ROOT
from tests.slurm.runs import LoginNode, world

WITHOUT_ENVIRONMENT = ("slurm.extra.export=NONE",)
"""So Slurm leaves SLURM_EXPORT_ENV=NONE in the job, by which srun would hand nothing on."""

PYTHONS_AND_TORCHS = ("LC_CTYPE", "TORCHINDUCTOR_")
"""What Python sets when it starts, and PyTorch when it is imported."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "more"),
    [
        ("agent", ()),
        pytest.param("agent", WITHOUT_ENVIRONMENT, marks=pytest.mark.long),
        pytest.param("srun", WITHOUT_ENVIRONMENT, marks=pytest.mark.long),
        pytest.param("torchrun", (), marks=pytest.mark.long),
    ],
)
def test_the_table_of_env_in_each_rank_is_the_ranks_environment(
    cluster: Cluster, login: LoginNode, launcher: str, more: tuple[str, ...]
) -> None:
    """Held against `os.environ` as the worker's code sees it.

    A forked worker's /proc/PID/environ is what its agent was started with: it serves here to tell what was given since.
    """
    login.add_recipe(ROOT / "tests" / "slurm" / "telling_recipe.py")
    folder = login.folder / "found"
    folder.mkdir()
    shutil.chown(folder, USER, USER)
    asked = [
        "recipe.target=telling_recipe:build",
        "recipe.args={}",
        f"recipe.args.folder={folder}",
        "train.max_steps=2",
        "checkpoint.keep_best=0",
    ]

    login.submit("told", *asked, *world(2, 2), f"launcher={launcher}", "env.OF_THE_RUN=here", *more, "--wait")

    meeting = re.search(r"ranks meet at (\S+) port (\d+)", login.console("told"))
    assert meeting is not None
    for rank in range(4):
        found = json.loads((folder / f"rank-{rank}.json").read_text())
        environ, rows = found["environ"], {row["name"]: row for row in found["env"]}
        assert {name: row["value"] for name, row in rows.items()} == {name: environ.get(name) for name in rows}
        carried = json.loads(environ[TABLE_VARIABLE])["variables"]  # as the launcher wrote it
        assert {name: row[0] for name, row in carried.items()} == {name: environ.get(name) for name in rows}
        assert (rows["RANK"]["value"], rows["NODE_RANK"]["value"]) == (str(rank), str(rank // 2))
        assert rows["MASTER_ADDR"]["value"] == meeting[1]
        assert (rows["NCCL_SOCKET_IFNAME"]["value"], rows["CUBLAS_WORKSPACE_CONFIG"]["value"]) == ("=ib0", ":4096:8")
        assert not [name for name, row in rows.items() if row["source"] in {"-", "environment"}]
        assert environ["OF_THE_RUN"] == "here"
        if (
            launcher != "torchrun"
        ):  # it chooses a port and sets variables of its own, before the worker's process begins
            before = {name for name, _, _ in (line.partition("=") for line in found["at_exec"])}
            given = {name for name in environ.keys() - before if not name.startswith(PYTHONS_AND_TORCHS)}
            told = {name for name in {*rows, TABLE_VARIABLE} - before if not name.startswith(PYTHONS_AND_TORCHS)}
            assert given - {USERS_CODE, PROBE_FOLDER, PROBES_ITSELF, GIVEN_VARIABLE, CPUS_BEFORE} == told
            assert rows["MASTER_PORT"]["value"] == meeting[2]
        if launcher == "srun":  # where Slurm knows the ranks, it tells the same without the launcher's table
            derived = {row["name"]: row["value"] for row in found["derived_by_a_plain_task"]}
            assert derived == {name: row["value"] for name, row in rows.items() if name != "PYTHONPATH"}
