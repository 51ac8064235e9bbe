"""The tutorial's commands do, one after the other, what it shows: the laptop's and the cluster's."""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.consoles import Shown, not_printed, shown_in
from tests.slurm.cluster import Cluster
from tests.slurm.lab.settings import ROOT

pytestmark = pytest.mark.long

PARTS = {"## On your laptop": "/home/ada", "## On the cluster": "/scratch/ada"}
"""Where each part of the tutorial takes place."""
PATIENCE_S = 120


class Reader:
    """Who types what the tutorial shows; here, laptop and login node are one host."""

    def __init__(self, cluster: Cluster, home: Path) -> None:
        self.cluster, self.home, self.folder = cluster, home, home

    def type(self, shown: Shown, name: str) -> None:
        """Type a command, look again where it shows a state that is yet to come, and compare what it prints."""
        if shown.command.startswith("cd "):
            self.folder /= shown.command.removeprefix("cd ")
            return
        end = time.monotonic() + PATIENCE_S
        seen: list[str] = []
        while True:
            done = self._run(shown.command, on_laptop=name == PARTS["## On your laptop"])
            missing = not_printed(shown, done.stdout, {str(self.home): name})
            seen.append(done.stdout)
            if not missing or not shown.command.startswith("ddp-hpc status") or time.monotonic() > end:
                break
            time.sleep(0.5)
        assert done.returncode == 0, done.stdout + done.stderr
        assert missing == [], f"$ {shown.command}\n{done.stdout}{done.stderr}\nbefore:\n" + "\n".join(
            dict.fromkeys(seen)
        )

    def _run(self, command: str, *, on_laptop: bool) -> CompletedProcess[str]:
        local = " --cluster local" if on_laptop and command.startswith("ddp-hpc submit") else ""
        return self.cluster.run("bash", "-c", command + local, cwd=self.folder, check=False, timeout=600)


def test_the_tutorials_commands_print_what_it_shows_and_its_three_runs_end_in_one_state(
    cluster: Cluster, shared_dir: Path
) -> None:
    _, *parts = re.split(r"^(## .*)\n", (ROOT / "docs" / "tutorial.md").read_text(), flags=re.MULTILINE)
    reader = Reader(cluster, shared_dir)

    typed = []
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        for shown in shown_in(text) if title in PARTS else ():
            reader.type(shown, PARTS[title])
            typed.append(shlex.split(shown.command)[:2])

    digests = [
        cluster.run("ddp-hpc", "checkpoints", run, "--digest", cwd=reader.folder).stdout
        for run in ("laptop", "killed", "cluster")
    ]
    assert len(set(digests)) == 1
    assert ["sbatch", "--partition=high"] in typed
    assert len(typed) >= 16
