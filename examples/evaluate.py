"""Evaluate the newest checkpoint of a run on its held-out data; exit with 1 if a metric is too low.

pip install safetensors
python evaluate.py runs/digits-train --at-least accuracy=0.9
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import ddp_hpc
from ddp_hpc.train.recipe import build_recipe


def main() -> str | None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path, help="the run's directory")
    parser.add_argument("--at-least", metavar="METRIC=VALUE", default="")
    args = parser.parse_args()

    asked = ddp_hpc.load(args.run / "config.yaml").recipe
    recipe = build_recipe(asked.target, asked.args)  # or the function of yours that makes the model and the data
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder, "model.safetensors")
        # Only a committed checkpoint is read, of which every byte is verified.
        subprocess.run([sys.executable, "-m", "ddp_hpc", "export", args.run, "-o", weights], check=True)
        recipe.model.load_state_dict(load_file(weights))

    if recipe.eval_data is None:
        return "the recipe has no held-out data"
    recipe.model.eval()
    found: dict[str, list[torch.Tensor]] = {name: [] for name in recipe.metrics}
    with torch.no_grad():
        for inputs, targets in DataLoader(recipe.eval_data, batch_size=256):
            outputs = recipe.model(inputs)
            for name, metric in recipe.metrics.items():
                found[name].append(metric(outputs, targets))
    means = {name: float(torch.cat(values).mean()) for name, values in found.items()}
    print(means)
    name, _, least = args.at_least.partition("=")
    return f"{name} is {means[name]:.4f}, but must be {least}" if name and means[name] < float(least) else None


if __name__ == "__main__":
    sys.exit(main())
