"""A profile of a whole run: the training is the same to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.whole_runs import make_workplace

CONFIG = """
recipe: {target: "trial_recipe:build", args: {num_samples: 48}}
train: {epochs: 99, max_steps: 8, global_batch_size: 8, lr: 0.01}
resources: {workers_per_node: 2}
"""


@pytest.mark.long
def test_a_run_with_a_profile_ends_with_the_same_bits_and_says_where_the_profile_is(tmp_path: Path) -> None:
    place = make_workplace(tmp_path / "place", CONFIG)
    asked = ["profile.kind=torch", "profile.steps=[4,6]", "profile.ranks=[0,1]"]

    for name, words in (("plain", []), ("recorded", asked)):
        done = place.submit(name, "--wait", *words)
        assert done.returncode == 0, done.stderr

    assert place.digest("plain") == place.digest("recorded")
    files = sorted(path.name for path in place.run("recorded").profile.iterdir())
    kinds = ("operators.txt", "trace.json.gz")
    assert files == [f"attempt-0.rank-{rank}.{kind}" for rank in (0, 1) for kind in kinds]
    shown = json.loads(place.command("status", "recorded", "--json").stdout)["profile"]
    assert shown == [str(place.run("recorded").profile_trace(0, rank)) for rank in (0, 1)]
    assert not place.run("plain").profile.exists()
