"""The trial recipe with saves that are slow on purpose: reading the weights takes `save_s` seconds."""

from __future__ import annotations

import time

import trial_recipe  # type: ignore[import-not-found]  # beside it where a campaign trains

from ddp_hpc.train.recipe import Recipe


def build(*, load_s: float, save_s: float) -> Recipe:
    """Return the recipe."""
    recipe: Recipe = trial_recipe.build(num_samples=480, load_s=load_s)
    recipe.model.register_state_dict_pre_hook(lambda *_: time.sleep(save_s))
    return recipe
