"""A script of Hydra's usual shape: killed on two ranks it comes back and reads its own checkpoint, and it takes the points of a sweep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_scripts import TWO, Place, until

CONFIG = "lr: 0.5\nseed: 0\nnum_steps: 4\nmodel:\n  width: 3\n"
SCRIPT = """
import json
import os
import time
from pathlib import Path

import hydra
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(cfg.seed)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(cfg.model.width, 1))
    out = Path(HydraConfig.get().runtime.output_dir)
    checkpoint, first = out / "checkpoint.pt", 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        first = state["step"]
    print(f"begins at step {first}, lr {cfg.lr}, in {os.getcwd()}", flush=True)
    for step in range(first + 1, cfg.num_steps + 1):
        model.zero_grad()
        model(torch.ones(1, cfg.model.width)).sum().backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight -= cfg.lr * weight.grad
        if dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "step": step}, out / "checkpoint.tmp")
            os.replace(out / "checkpoint.tmp", checkpoint)
        while step == 2 and cfg.get("hold") and not Path(cfg.hold).exists():
            time.sleep(0.02)
    if dist.get_rank() == 0:
        weights = [value.item() for weight in model.parameters() for value in weight.flatten()]
        (out / "result.json").write_text(json.dumps({"lr": cfg.lr, "seed": cfg.seed, "weights": weights}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text(CONFIG)
    (tmp_path / "train.py").write_text(SCRIPT)
    return Place(tmp_path)


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def test_a_script_with_hydra_is_killed_comes_back_to_its_own_checkpoint_and_runs_as_the_points_of_a_sweep(
    place: Place,
) -> None:
    settings = (*TWO, "name=it", "script.progress=out/it/*.pt", "restart.in_place=false")
    command = ("python", "train.py", "lr=0.25", "+hold=go", "hydra.run.dir=out/it")
    assert place.submit(settings, *command, wait=False).returncode == 0
    until((place.path / "out/it/checkpoint.pt").exists)
    place.script_processes("it")[1].kill()
    until(lambda: place.attempts("it")[-1].ending is not None)
    (place.path / "go").touch()
    again = place.submit(settings, *command)

    assert again.returncode == 0, again.stdout + again.stderr
    assert [attempt.cause for attempt in place.attempts("it")] == ["worker crashed", "finished"]
    for rank in range(2):
        assert f"begins at step 0, lr 0.25, in {place.path}" in place.log("it", rank)
        assert "begins at step 0" not in place.log("it", rank, attempt=1)
        assert f"lr 0.25, in {place.path}" in place.log("it", rank, attempt=1)
    assert not (place.path / "outputs").exists()

    swept = ("submit", "--cluster", "local", "name=grid", "resources.workers_per_node=2")
    words = ("--sweep", "lr=0.25,0.5", "--sweep", "seed=0,1", "--", "python", "train.py", "lr={lr}", "seed={seed}")
    started = place.ddp_hpc(*swept, *words, "hydra.run.dir=out/{point}")
    assert started.returncode == 0, started.stderr
    names = [f"{number:03}-lr-{lr}-seed-{seed}" for number, (lr, seed) in enumerate(PAIRS)]

    found = [result(place.path / "out" / name) for name in names]
    assert [(each["lr"], each["seed"]) for each in found] == PAIRS
    assert len({json.dumps(each["weights"]) for each in found}) == 4
    assert found[0]["weights"] == result(place.path / "out/it")["weights"]


PAIRS = [(0.25, 0), (0.25, 1), (0.5, 0), (0.5, 1)]
