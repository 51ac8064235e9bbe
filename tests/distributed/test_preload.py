"""What the agent has imported, its workers need not import again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.whole_runs import make_workplace
from tests.made_run import make_run

MOST_LATE_BYTES = 200_000
"""PyTorch's first backward pass imports four small modules, from a function."""
CONFIG = """
recipe: {target: "noting_recipe:build"}
resources: {workers_per_node: 2}
train: {max_steps: 2, global_batch_size: 8}
"""
RECIPE = """
import os, sys
from pathlib import Path
import torch
from torch.utils.data import TensorDataset
from ddp_hpc.train.recipe import Recipe

of_agent = set()
os.register_at_fork(after_in_child=lambda: of_agent.update(sys.modules))

def loss(outputs, targets):
    if torch.__version__ >= "2.7":  # before, DDP imports it in any case
        assert "torch._dynamo.eval_frame" not in sys.modules, "the compiler has been imported"
    late = {name: getattr(sys.modules[name], "__file__", None) for name in set(sys.modules) - of_agent}
    lines = [f"{name} {Path(file).stat().st_size if file else 0}\\n" for name, file in late.items()]
    Path(__file__).with_name(f"late-{os.environ['RANK']}").write_text("".join(lines))
    return torch.nn.functional.mse_loss(outputs, targets)

def build():
    data = TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
    return Recipe(model=torch.nn.Linear(4, 1), train_data=data, eval_data=data, loss=loss)
"""


@pytest.mark.long
def test_workers_import_nothing_of_size_after_the_fork_and_no_compiler(tmp_path: Path) -> None:
    (tmp_path / "noting_recipe.py").write_text(RECIPE)
    make_workplace(tmp_path, CONFIG).finish("one")

    for rank in range(2):
        late = dict(line.split() for line in (tmp_path / f"late-{rank}").read_text().splitlines())
        assert sum(map(int, late.values())) < MOST_LATE_BYTES, late


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("recipe: {target: image_classification, args: {model: resnet18, dataset: fake}}", "torchvision.models"),
        ("recipe: {target: image_classification}\ntrain: {compile: true}", "torch._dynamo.eval_frame"),
        ("recipe: {target: image_classification}\ntrain: {deterministic: true}", "torch._inductor.config"),
    ],
)
def test_what_every_worker_will_need_for_its_configuration_is_imported_before_the_fork(
    config: str, expected: str, tmp_path: Path
) -> None:
    run = make_run(tmp_path)
    run.config.write_text(f"name: one\n{config}\n")
    script = (
        f"import sys; from ddp_hpc.train import worker; worker.preload(sys.argv[1]); assert {expected!r} in sys.modules"
    )

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(run.path)],
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )

    assert done.returncode == 0, done.stderr


def test_a_guardian_starts_without_large_packages() -> None:
    script = (
        "import sys, ddp_hpc.job.guardian; sys.exit(' '.join({'psutil', 'torch', 'numpy', 'yaml'} & set(sys.modules)))"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)

    assert done.stderr.strip() == ""
