"""Keys that earlier versions had: a run that holds them goes on, and whoever asks for one is told what to do instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.run.config.keys import all_keys
from ddp_hpc.run.config.removed import REMOVED_KEYS
from ddp_hpc.run.config.resolve import load_resolved, removed_key_notes, resolve
from ddp_hpc.run.run_dir.paths import RunDir

NO_SITE = {"DDP_HPC_SITE_PROFILE": ""}
OF_2026_11_25 = """\
name: a                                   # command line
train:
  epochs: 2                               # file c.yaml
integrity:
  every_steps: 50                         # file c.yaml
  recompute_every_steps: null             # default
profile:
  kind: off                               # default
"""
"""Lines of a run's config.yaml as the version of that day wrote them."""
GONE = "integrity.recompute_every_steps"


def kept(path: Path, text: str) -> RunDir:
    """Return the directory of a run that has begun."""
    run = RunDir(path)
    run.config.write_text(text)
    run.attempts.touch()
    return run


def test_a_run_of_an_earlier_version_is_read_without_a_word_where_the_removed_key_has_its_default(
    tmp_path: Path,
) -> None:
    run = kept(tmp_path, OF_2026_11_25)

    spec = load_resolved(run.config)

    assert (spec.train.epochs, spec.integrity.every_steps) == (2, 50)
    assert removed_key_notes(run.config) == []
    assert resolve(run.config, [f"runs_dir={tmp_path.parent}"], NO_SITE).spec.train == spec.train


def test_another_value_of_a_removed_key_is_told_in_one_line_and_has_no_effect(tmp_path: Path) -> None:
    run = kept(tmp_path, OF_2026_11_25.replace("steps: null", "steps: 1000"))

    [told] = removed_key_notes(run.config)

    assert told.startswith(f"note: `{GONE}` is 1000 in {run.config}, but since 2026-11-26 it is no longer a key")
    assert "`ddp-hpc audit RUN`" in told
    assert load_resolved(run.config).integrity.every_steps == 50
    assert resolve(run.config, [], NO_SITE).spec.integrity.every_steps == 50


@pytest.mark.parametrize(
    ("text", "words", "variables", "place"),
    [
        ("integrity:\n  recompute_every_steps: null", [], {}, "run.yaml, line 2"),
        ("", [f"{GONE}=1000"], {}, "the command line"),
        ("", [], {"DDP_HPC__INTEGRITY__RECOMPUTE_EVERY_STEPS": "5"}, "environment DDP_HPC__INTEGRITY__RECOMP"),
    ],
)
def test_whoever_sets_a_removed_key_is_refused_and_told_what_to_do_instead(
    tmp_path: Path, text: str, words: list[str], variables: dict[str, str], place: str
) -> None:
    (tmp_path / "run.yaml").write_text(text)

    told = rf"`{re.escape(GONE)}` \(.*{place}.*\) is no longer a key, since 2026-11-26\. Leave it out: `ddp-hpc audit"
    with pytest.raises(ConfigError, match=told):
        resolve(tmp_path / "run.yaml", words, NO_SITE | variables)


def test_a_file_with_the_steps_of_a_pipeline_is_refused_with_what_submits_one_run_after_another(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("steps:\n  train: {seed: 1}\n  export: {after: train}\n")

    with pytest.raises(
        ConfigError, match=r"`steps` \(.*line 1\) is no longer a key, .*`ddp-hpc submit CONFIG --after RUN`"
    ):
        resolve(tmp_path / "run.yaml", [], NO_SITE)


def test_a_site_profile_with_a_removed_key_is_refused_with_what_to_do_instead(tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text("site:\n  report_notes: notes.yaml\n")

    with pytest.raises(
        ConfigError, match=r"`site.report_notes` \(.*line 2\) is no longer a key, .*`ddp-hpc status RUN"
    ):
        resolve(None, [], {"DDP_HPC_SITE_PROFILE": str(path)})


def test_no_row_names_a_key_that_exists_and_each_says_when_and_what_instead() -> None:
    assert not REMOVED_KEYS.keys() & all_keys().keys()
    for one in REMOVED_KEYS.values():
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", one.since)
        assert one.instead.endswith(".")
