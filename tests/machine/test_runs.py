"""A whole run: what is sampled beside its workers, and where a person sees it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from ddp_hpc.run.run_dir.machine_use import read_uses
from tests.distributed.whole_runs import Workplace
from tests.machine.fake_nvml import build

BUSY = """
import psutil, time
deadline = time.time() + 120
def is_sampled():
    agents = [f"--parent={one.pid}" for one in psutil.Process().parents()]
    samplers = [one for one in psutil.process_iter() if "ddp_hpc.cluster.machine.sampler" in arguments(one)]
    return any(set(agents) & set(arguments(one)) and time.time() - one.create_time() > 2.5 for one in samplers)
def arguments(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []
while not is_sampled() and time.time() < deadline:
    sum(range(100000))
    time.sleep(0.1)
"""
"""Trains until its node has been sampled for a moment."""


@pytest.mark.long
def test_a_script_that_knows_nothing_of_it_has_its_gpus_cpus_and_memory_in_status_and_log(
    tmp_path: Path,
) -> None:
    fake = build(tmp_path / "driver", "gpu GPU-a 35 61440 81920\ngpu GPU-b 80 1024 81920\n")
    (tmp_path / "script.py").write_text(BUSY)
    (tmp_path / "run.yaml").write_text(
        f"resources: {{gpus_per_node: 1}}\nscript: {{command: [{sys.executable}, script.py]}}\n"
    )
    place = Workplace(tmp_path, {**os.environ, **fake, "CUDA_VISIBLE_DEVICES": "GPU-a"})

    done = place.command("submit", "run.yaml", "name=one", "--wait")
    status = json.loads(place.command("status", "one", "--json").stdout)

    assert done.returncode == 0, done.stderr
    [line] = read_uses(place.run("one"), 0)
    assert (line.gpu_busy, line.gpu_memory_gib) == (0.35, 60.0)
    assert line.cpu_busy is not None
    assert line.cpu_busy > 0
    assert round(status["machines"]["gpu_busy"], 6) == 0.35
    assert status["machines"]["nodes"][0]["num_cpus"] >= 1


def test_submit_takes_the_free_gpus_of_the_machine_says_which_it_leaves_and_refuses_too_many(tmp_path: Path) -> None:
    """The driver alone is asked: no worker starts."""
    fake = build(tmp_path / "driver", "gpu GPU-a 0 100 81920\ngpu GPU-b 90 61440 81920\ngpu GPU-c 0 100 81920\n")
    (tmp_path / "run.yaml").write_text("train: {global_batch_size: 60}\n")
    environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    place = Workplace(tmp_path, {**environ, **fake})

    dry = place.command("submit", "run.yaml", "--cluster", "local", "--dry-run", "--json")
    script = place.command("submit", "--cluster", "local", "--dry-run", "--json", "--", "python", "train.py")
    refused = place.command("submit", "run.yaml", "--cluster", "local", "resources.gpus_per_node=4")

    config = json.loads(dry.stdout)["config"]
    assert config["resources.gpus_per_node"] == {"value": 2, "source": "2 GPUs of this machine"}
    assert config["env.CUDA_VISIBLE_DEVICES"]["value"] == "0,2"
    assert "note: GPU 1 is left out: 60.0 GiB of its memory are in use" in dry.stderr
    assert json.loads(script.stdout)["config"]["resources.workers_per_node"]["value"] == 1
    assert "`resources.workers_per_node=2`" in script.stderr
    assert (refused.returncode, place.run("run").path.exists()) == (2, False)
    assert "asks for 4 GPUs (`resources.gpus_per_node`), but this machine shows 3 GPUs" in refused.stderr
