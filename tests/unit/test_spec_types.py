"""Specs made in Python: each field holds what its annotation says, or the error names its key."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.run import spec as typed
from ddp_hpc.run.config.resolve import Resolved, flat_spec, load_resolved, render_resolved
from ddp_hpc.run.spec import RunSpec

MADE: Any = typed
"""Classes whose arguments no checker looks at, as in a notebook."""
SECTIONS = {name: kind for name, kind in get_type_hints(RunSpec).items() if dataclasses.is_dataclass(kind)}
FIELDS = [(name, kind, field.name) for name, kind in SECTIONS.items() for field in dataclasses.fields(kind)]


@pytest.mark.parametrize(("section", "kind", "field"), FIELDS, ids=[f"{row[0]}.{row[2]}" for row in FIELDS])
def test_every_field_of_every_section_refuses_what_it_cannot_be_by_its_key(section: str, kind: Any, field: str) -> None:
    with pytest.raises(ConfigError, match=rf"`{section}\.{field}` is <object .*, but it must be "):
        kind(**{field: object()})


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: MADE.TrainSpec(lr="x"), "`train.lr` is 'x', but it must be a number."),
        (lambda: MADE.TrainSpec(epochs=2.5), "`train.epochs` is 2.5, but it must be a whole number."),
        (lambda: MADE.TrainSpec(epochs=True), "`train.epochs` is True, but it must be a whole number."),
        (
            lambda: MADE.TrainSpec(precision="fp8"),
            "`train.precision` is 'fp8', but it must be one of fp32, bf16, fp16.",
        ),
        (lambda: MADE.TrainSpec(max_steps="all"), "must be a whole number, or null."),
        (lambda: MADE.OptimizerSpec(betas=(0.9,)), "`optimizer.betas` is (0.9,), but it must be a list of 2 numbers."),
        (lambda: MADE.SlurmSpec(modules="cuda"), "`slurm.modules` is 'cuda', but it must be a list of texts."),
        (lambda: MADE.RunSpec(name=3), "`name` is 3, but it must be text."),
        (lambda: MADE.RunSpec(name="a", train={"lr": 1}), "`train` is {'lr': 1}, but it must be a TrainSpec."),
        (lambda: MADE.RunSpec(name="a", env=["A=1"]), "`env` is ['A=1'], but it must be a mapping."),
    ],
)
def test_a_value_of_another_type_is_an_error_that_says_what_it_must_be(make: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        make()


def test_numbers_of_numpy_lists_and_paths_become_what_a_file_can_hold(tmp_path: Path) -> None:
    spec = MADE.RunSpec(
        name="a",
        runs_dir=tmp_path,
        train=MADE.TrainSpec(lr=np.float32(0.5), epochs=np.int64(3)),
        optimizer=MADE.OptimizerSpec(betas=[np.float64(0.5), 1]),
        checkpoint=MADE.CheckpointSpec(every_steps=np.int32(7)),
    )

    (tmp_path / "config.yaml").write_text(render_resolved(Resolved(spec, dict.fromkeys(flat_spec(spec), "Python"))))

    assert load_resolved(tmp_path / "config.yaml") == spec
    assert (type(spec.train.lr), type(spec.train.epochs), spec.runs_dir) == (float, int, str(tmp_path))
