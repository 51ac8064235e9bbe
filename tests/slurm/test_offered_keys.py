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
            *["slurm.constraint=fast", "slurm.extra.reservation=maint", f"slurm.dependency=afterany:{first}"],
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


REFUSED = {
    "slurm.constraint=none-has-it": "`slurm.constraint` is 'none-has-it', but no node has that",
    "slurm.extra.reservation=nobodys": "`slurm.extra.reservation=nobodys`",
    "slurm.nodelist=nod1": "`slurm.nodelist` ('nod1')",
    "slurm.partition=bacth": "`slurm.partition` is 'bacth'; the cluster has batch (4 nodes)",
    "slurm.qos=hihg": "`slurm.qos` 'hihg'; you may use lab (QOS high",
    "slurm.account=nobodys": "`slurm.account` is 'nobodys'",
    "slurm.extra.mem_per_cup=4G": "`slurm.extra`: mem_per_cup",
    "resources.gpus_per_node=8": "`resources.gpus_per_node` is 8, but a node of partition batch has at most 4 GPUs",
    "runs_dir=/usr/runs": "The run's directory /usr/runs/refused cannot be written: Permission denied",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_the_cluster_does_not_have_is_refused_before_the_queue(word: str, login: LoginNode) -> None:
    (login.folder / "train.py").touch()
    shape = [] if "gpus" in word else ["resources.workers_per_node=1"]
    for how in (["--dry-run"], []):
        words = ["submit", "name=refused", "--cluster", "slurm", *how, *shape, word, "--", "python", "train.py"]
        done = login.type(*words)

        assert (done.returncode, done.stdout) == (2, ""), how
        assert done.stderr.startswith("error: ")
        assert REFUSED[word] in done.stderr
        assert not login.run("refused").path.exists()
