"""A profile of a real cluster: proposed from what it says, and what it does to a run on it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ddp_hpc.run.config.resolve import load_resolved
from tests.slurm.cluster import USER, Cluster
from tests.slurm.runs import SMALL, TRIAL_RECIPE, LoginNode, world

RECIPE = """
import os
import trial_recipe


def build():
    print("told:", os.environ["OF_THE_SITE"], flush=True)
    return trial_recipe.build()
"""
MODULE = """#!/bin/sh
echo "$@" >>"$(dirname "$0")/modules"
[ "$1" = purge ] || [ "$2" = there/1.0 ]
"""
"""Where a site has a shell function."""


def give(folder: Path, name: str, text: str, mode: int = 0o644) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    for one in (path, path.parent):
        shutil.chown(one, USER, USER)
    return path


def test_a_proposed_profile_knows_the_cluster_and_is_one(cluster: Cluster, login: LoginNode) -> None:
    proposed = login.type("site", "init")
    assert proposed.returncode == 0, proposed.stderr

    profile = give(login.folder, "mine.yaml", proposed.stdout)
    shown = login.type("site", "show", str(profile))

    partitions = cluster.run("sinfo", "--noheader", "--format=%R").stdout.split()
    assert shown.returncode == 0, shown.stderr
    assert {f"{name}:" for name in partitions} <= {
        line.split()[0] for line in proposed.stdout.splitlines() if line.strip()
    }
    assert "gpus_per_node" in proposed.stdout


@pytest.mark.long
def test_a_profile_chooses_network_modules_and_variables_of_a_run(login: LoginNode) -> None:
    login.add_recipe(TRIAL_RECIPE)
    give(login.folder, "told.py", RECIPE)
    give(login.folder, "run.yaml", "recipe: {target: 'told:build'}\n")
    give(login.folder / "bin", "module", MODULE, 0o755)
    profile = give(
        login.folder,
        "mine.yaml",
        "site: {no_write: [/tmp/elsewhere]}\n"
        "network: {interfaces: [eth*]}\n"
        "slurm: {modules: [there/1.0]}\n"
        "env: {OF_THE_SITE: \"a b $HOME `c` 'd'\", WANDB_API_KEY: hush}\n",
    )
    words = ["submit", "run.yaml", "name=sited", "--cluster", "slurm", "--site", str(profile), "--wait"]
    path = {"PATH": f"{login.folder / 'bin'}:{Path(shutil.which('bash') or '').parent}:/usr/bin:/bin"}

    done = login.type(*words, *SMALL, *world(2, 1), env=path)

    assert done.returncode == 0, done.stdout + done.stderr + login.console("sited")
    run = login.run("sited")
    assert "eth0, `network.interfaces` names this interface" in login.console("sited")
    assert "not ib0: not preferred" in login.console("sited")
    assert "WANDB_API_KEY is set" in login.console("sited")
    assert "hush" not in login.console("sited")
    for rank in range(2):
        assert "told: a b $HOME `c` 'd'" in run.rank_log(0, rank).read_text()
    assert (login.folder / "bin" / "modules").read_text().splitlines() == ["purge", "load there/1.0"]
    assert load_resolved(run.config).network.interfaces == ("eth*",)


@pytest.mark.long
def test_a_job_without_its_module_ends_with_its_name(login: LoginNode) -> None:
    give(login.folder / "bin", "module", MODULE, 0o755)
    path = {"PATH": f"{login.folder / 'bin'}:/usr/bin:/bin"}
    words = ["submit", "digits.yaml", "name=without", "--cluster", "slurm", "--wait", "slurm.modules=[missing/2.0]"]

    done = login.type(*words, *SMALL, env=path)

    assert done.returncode != 0
    assert "module load failed on node1" in login.console("without")
    assert "missing/2.0" in login.console("without")
