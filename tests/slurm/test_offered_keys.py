"""Keys that are handed on to Slurm: what Slurm makes of them shows that none is ignored."""

from __future__ import annotations

import re

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.lab.settings import ROOT
from tests.slurm.runs import SMALL, TRIAL_RECIPE, LoginNode, world

pytestmark = pytest.mark.long


def test_one_run_by_all_keys_that_are_handed_on(cluster: Cluster, login: LoginNode) -> None:
    login.add_recipe(TRIAL_RECIPE)
    template = login.folder / "mine.j2"
    ours = (ROOT / "sbatch_templates" / "ddp.sbatch.j2").read_text()
    template.write_text(
        ours.replace("\nddp_hpc_stop_requested=\n", "\necho 'a template of my own'\nddp_hpc_stop_requested=\n")
    )
    cluster.run("scontrol", "update", "nodename=node2", "availablefeatures=fast", "activefeatures=fast", user="root")
    reserved = ["reservationname=maint", "starttime=now", "duration=60", "users=hpc", "nodes=node2"]
    cluster.run("scontrol", "create", "reservation", *reserved, user="root")
    try:
        first = cluster.run("sbatch", "--parsable", "--hold", "--wrap=true").stdout.strip()
        login.submit(
            *["offered", *SMALL, *world(1, 1), "recipe.target=trial_recipe:build", "recipe.args={}"],
            *["slurm.constraint=fast", "slurm.reservation=maint", f"slurm.dependency=afterany:{first}"],
            *["slurm.extra.mail_type=END", "slurm.extra.mail_user=ada@example.org", f"slurm.template={template}"],
            *["slurm.srun_args=[--job-name=my-step]", "resources.time_limit_min=10"],
        )
        job = login.status("offered")["job_id"]
        facts = cluster.run("scontrol", "show", "job", job).stdout

        cluster.run("scancel", first)
        cluster.wait_for(login.run("offered").done.exists, 300)

        for fact in (rf"Dependency=afterany:{first}", "Features=fast", "Reservation=maint", "MailUser=ada@example.org"):
            assert re.search(rf"\b{fact}\b", facts), fact
        assert re.search(r"\bMailType=\S*END", facts)
        assert "a template of my own" in login.console("offered")
        cluster.wait_for(lambda: "my-step" in cluster.run("sacct", "-n", "-j", job, "-o", "JobName").stdout, 60)
        assert cluster.run("sacct", "-n", "-X", "-j", job, "-o", "NodeList").stdout.strip() == "node2"
    finally:
        cluster.run("scancel", "--user", "hpc", check=False)
        cluster.run("scontrol", "delete", "reservationname=maint", user="root", check=False)
        cluster.run("scontrol", "update", "nodename=node2", "availablefeatures=", "activefeatures=", user="root")


@pytest.mark.parametrize("word", ["slurm.constraint=none-has-it", "slurm.reservation=nobodys"])
def test_what_the_cluster_does_not_have_is_refused_before_the_queue(word: str, login: LoginNode) -> None:
    done = login.type("submit", "digits.yaml", "name=refused", "--cluster", "slurm", word)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert not login.run("refused").path.exists()
