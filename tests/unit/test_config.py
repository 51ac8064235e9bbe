"""From sources to a spec: precedence, types, and errors that name key, value, place and what is wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.field_types import is_optional, without_none
from ddp_hpc.run.config.keys import Key, all_keys
from ddp_hpc.run.config.resolve import (
    Resolved,
    changed_keys,
    flat_spec,
    load_resolved,
    render_resolved,
    resolve,
    resolve_key,
)
from ddp_hpc.run.config.yaml_text import dump_value
from ddp_hpc.run.spec import RunSpec

NO_SITE = {"DDP_HPC_SITE_PROFILE": ""}


def resolved(
    path: Path, text: str = "", overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Resolved:
    """Resolve a file of this text."""
    file = path / "run.yaml"
    file.write_text(text)
    return resolve(file, overrides, {**NO_SITE, **(environment or {})})


def test_each_source_wins_over_those_before_it(tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("train: {lr: 1, epochs: 1, max_steps: 1, global_batch_size: 1}")
    environment = {"DDP_HPC_SITE_PROFILE": str(site), "DDP_HPC__TRAIN__LR": "3", "DDP_HPC__TRAIN__EPOCHS": "3"}
    text = "train: {lr: 2, epochs: 2, max_steps: 2}"

    found = resolved(tmp_path, text, ["train.lr=4"], environment)

    train = found.spec.train
    assert (train.lr, train.epochs, train.max_steps, train.global_batch_size, train.micro_batch_size) == (
        4,
        3,
        2,
        1,
        None,
    )
    assert [
        found.sources[f"train.{key}"] for key in ("lr", "epochs", "max_steps", "global_batch_size", "precision")
    ] == [
        "command line",
        "environment DDP_HPC__TRAIN__EPOCHS",
        "file run.yaml",
        f"site profile {site}",
        "default",
    ]


SHELL = {
    "SBATCH_PARTITION": "debug",
    "SBATCH_ACCOUNT": "lab",
    "SBATCH_QOS": " ",
    "SBATCH_TIMELIMIT": "1-00:00:30",
    "SBATCH_RESERVATION": "0042",
}


def test_what_a_shell_sets_for_sbatch_wins_over_defaults_only(tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("slurm: {account: ours}\npartitions: {debug: {slurm: {constraint: short}}}")

    found = resolved(tmp_path, "", [], {**SHELL, "DDP_HPC_SITE_PROFILE": str(site)})

    slurm = found.spec.slurm
    assert slurm.extra == {"reservation": "0042"}
    assert (slurm.partition, slurm.account, slurm.qos, slurm.constraint) == ("debug", "ours", None, "short")
    assert (found.spec.resources.time_limit_min, found.sources["slurm.partition"]) == (
        1441,
        "environment SBATCH_PARTITION",
    )


@pytest.mark.parametrize("of_job", [{"SLURM_JOB_ID": "7"}, {"SLURM_JOBID": "7"}])
def test_inside_of_a_job_the_variables_of_sbatch_are_the_jobs_and_count_for_nothing(
    of_job: dict[str, str], tmp_path: Path
) -> None:
    assert resolved(tmp_path, "", [], {**SHELL, **of_job}).spec == resolved(tmp_path).spec


def test_on_one_machine_the_variables_of_sbatch_count_for_nothing() -> None:
    assert resolve(None, [], {**NO_SITE, **SHELL}, is_for_slurm=False).spec.slurm.partition is None


def test_a_time_of_the_shell_that_no_key_can_say_is_refused_only_where_it_counts(tmp_path: Path) -> None:
    shell = {"SBATCH_TIMELIMIT": "UNLIMITED"}

    with pytest.raises(ConfigError, match=r"'UNLIMITED' \(environment SBATCH_TIMELIMIT\)"):
        resolved(tmp_path, "", [], shell)
    assert resolved(tmp_path, "resources: {time_limit_min: 5}", [], shell).spec.resources.time_limit_min == 5


def test_the_site_profile_is_looked_for_in_the_users_home(tmp_path: Path) -> None:
    site = tmp_path / ".config/ddp_hpc/site.yaml"
    site.parent.mkdir(parents=True)
    site.write_text("runs_dir: /scratch/runs")
    (tmp_path / "run.yaml").touch()

    found = resolve(tmp_path / "run.yaml", [], {"HOME": str(tmp_path)})

    assert found.spec.runs_dir == "/scratch/runs"
    assert found.sources["runs_dir"] == f"site profile {site}"


def test_one_key_can_be_had_without_a_file(tmp_path: Path) -> None:
    assert resolve_key("runs_dir", NO_SITE) == "runs"
    assert resolve_key("runs_dir", {**NO_SITE, "ddp_hpc__runs_dir": "mine"}) == "mine"


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("digits.yaml", "digits"),
        ("my run (2).yaml", "my-run-2"),
        ("_x.yml", "x"),
        ("...", "run"),
        ("a" * 200, "a" * 128),
    ],
)
def test_a_run_is_named_after_its_file(file: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.touch()

    assert resolve(path, [], NO_SITE).spec.name == name


def test_a_file_whose_name_has_no_letter_that_a_runs_may_have_asks_for_a_name(tmp_path: Path) -> None:
    path = tmp_path / "実験.yaml"
    path.touch()

    with pytest.raises(ConfigError, match=r"'実験' has no letter .* Set `name=...`"):
        resolve(path, [], NO_SITE)
    assert resolve(path, ["name=net"], NO_SITE).spec.name == "net"
    path.write_text("name: net\n")
    assert resolve(path, [], NO_SITE).spec.name == "net"


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train.lr=1e-3", "train.lr", 1e-3),
        ("--train.lr=1", "train.lr", 1.0),
        ("train.max_steps=none", "train.max_steps", None),
        ("train.max_steps=", "train.max_steps", None),
        ("train.max_steps=010", "train.max_steps", 10),
        ("name=010", "name", "010"),
        ("slurm.qos=null", "slurm.qos", None),
        ("slurm.qos=12", "slurm.qos", "12"),
        ("slurm.partition=a: [b", "slurm.partition", "a: [b"),
        ("train.precision=bf16", "train.precision", "bf16"),
        ("lr_schedule.milestones=[10, 20]", "lr_schedule.milestones", (10, 20)),
        ("optimizer={momentum: 0.5}", "optimizer.momentum", 0.5),
        ("recipe.args.width=3", "recipe.args.width", 3),
        ("recipe.args.size=[3, 4]", "recipe.args.size", [3, 4]),
        ("recipe.args.word=12:30", "recipe.args.word", "12:30"),
        ("recipe.args.glob=*.png", "recipe.args.glob", "*.png"),
        ("recipe.args.color=#fff", "recipe.args.color", "#fff"),
        ("recipe.args.digits='12'", "recipe.args.digits", "12"),
        ("recipe.args.deep.er=true", "recipe.args.deep.er", True),
        ("recipe.args.by_class={3: a}", "recipe.args.by_class", {3: "a"}),
        ("slurm.extra.gpus-per-task=1", "slurm.extra.gpus-per-task", 1),
    ],
)
def test_a_word_of_the_command_line_is_read_as_its_key_wants_it(
    override: str, key: str, value: Any, tmp_path: Path
) -> None:
    found = flat_spec(resolved(tmp_path, "", [override]).spec)[key]

    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("variable", "key"),
    [
        ("DDP_HPC__TRAIN__MAX_STEPS", "train.max_steps"),
        ("ddp_hpc__train__max_steps", "train.max_steps"),
        ("DDP_HPC__SEED", "seed"),
        ("DDP_HPC__RECIPE__ARGS__NUM_CLASSES", "recipe.args.num_classes"),
        ("DDP_HPC__RECIPE__ARGS__numClasses", "recipe.args.numClasses"),
    ],
)
def test_a_variable_names_a_key_in_any_case(variable: str, key: str, tmp_path: Path) -> None:
    found = resolved(tmp_path, environment={variable: "5"})

    assert flat_spec(found.spec)[key] == 5
    assert found.sources[key] == f"environment {variable}"


def test_free_keys_of_all_sources_are_merged(tmp_path: Path) -> None:
    text = "recipe:\n  args:\n    width: 3\n    model: {depth: 2, norm: batch}\n    data: mnist\n"

    found = resolved(tmp_path, text, ["recipe.args.model.depth=9", "recipe.args.data.name=digits"])

    assert found.spec.recipe.args == {"width": 3, "model": {"depth": 9, "norm": "batch"}, "data": {"name": "digits"}}
    assert found.sources["recipe.args.model.norm"] == "file run.yaml"
    assert found.sources["recipe.args.model.depth"] == "command line"


def test_free_keys_can_be_taken_back(tmp_path: Path) -> None:
    found = resolved(tmp_path, "recipe.args: {width: 3}", ["recipe.args={}", "recipe.args.depth=1"])

    assert found.spec.recipe.args == {"depth": 1}


def test_sections_may_be_empty_and_keys_dotted(tmp_path: Path) -> None:
    assert resolved(tmp_path, "train:\noptimizer.momentum: 0.5\n").spec.optimizer.momentum == 0.5


WRONG: list[tuple[str, list[str], dict[str, str], str]] = [
    (
        "train:\n  lrr: 1",
        [],
        {},
        r"`train\.lrr` \(\S*run\.yaml, line 2\) is not a key. Did you mean `train\.lr`\? .*epochs",
    ),
    ("", ["lr=1"], {}, r"`lr` \(the command line\) is not a key\. Did you mean `train\.lr`\?"),
    ("", ["trian.lr=1"], {}, r"Did you mean `train\.lr`\? Keys and sections: name, runs_dir"),
    ("", [], {"DDP_HPC__TRAIN__LRR": "1"}, r"`train\.lrr` \(environment DDP_HPC__TRAIN__LRR\)"),
    ("", ["train.lr.x=1"], {}, r"`train\.lr\.x` .* is not a key"),
    ("", ["train.lr=fast"], {}, r"`train\.lr` is 'fast' \(the command line\), but it must be a number\."),
    (
        "train: {epochs: 1.5}",
        [],
        {},
        r"`train\.epochs` is 1\.5 \(\S*run\.yaml, line 1\), but it must be a whole number\.",
    ),
    ("train: {epochs: true}", [], {}, r"is True .* a whole number"),
    ("train: {lr: true}", [], {}, r"is True .* a number"),
    ("train: {lr: '1'}", [], {}, r"is '1' .* a number"),
    ("train: {max_steps: x}", [], {}, r"a whole number, or null"),
    ("train: {epochs: null}", [], {}, r"`train\.epochs` is None .* a whole number\."),
    ("data: {drop_last: 1}", [], {}, r"is 1 .* true or false"),
    ("data: {drop_last: yes}", [], {}, r"is 'yes' .* true or false"),
    ("train: {precision: fp31}", [], {}, r"one of fp32, bf16, fp16"),
    ("lr_schedule: {milestones: 5}", [], {}, r"is 5 .* a list of whole numbers"),
    ("lr_schedule: {milestones: [1, 2.5]}", [], {}, r"a list of whole numbers"),
    ("optimizer: {betas: [0.9]}", [], {}, r"a list of 2 numbers"),
    ("name: 3", [], {}, r"must be text\. Put it in quotes"),
    ("train: 3", [], {}, r"`train` is 3 .* must be a section"),
    ("recipe: {args: 3}", [], {}, r"`recipe\.args` is 3 .* must be a section"),
    ("recipe: {args: {1: 2}}", [], {}, r"the key 1 .* a key must be text"),
    ("", ["recipe.args.a b=1"], {}, r"`recipe\.args\.a b` .* is not a key"),
    ("", ["recipe.args.=1"], {}, r"`recipe\.args\.` .* is not a key"),
    ("", ["train.lr"], {}, r"'train\.lr' is not a setting. Write KEY=VALUE"),
    ("", ["lr_schedule.milestones=[1"], {}, r"'\[1' \(the command line\), line"),
    ("", ["recipe.args.x=\udcff"], {}, r"not UTF-8"),
    (
        "",
        [],
        {"DDP_HPC__SEED": "1", "ddp_hpc__seed": "2"},
        r"`seed` is set twice: environment DDP_HPC__SEED; environment d",
    ),
    ("train: {lr: 1}\ntrain.lr: 2", [], {}, r"`train\.lr` is set twice: \S*run\.yaml, line 1; \S*run\.yaml, line 2"),
    ("- 1", [], {}, r"has \[1\], but it must have keys and values"),
    ("", [], {"DDP_HPC_SITE_PROFILE": "/no/such"}, r"'/no/such' does not exist \(DDP_HPC_SITE_PROFILE"),
    ("", ["train.lr=-1"], {}, r"above zero\. \(`train\.lr` came from the command line\.\)"),
    ("name: a/b", [], {}, r"becomes a directory's name.*\(`name` came from \S*run\.yaml, line 1\.\)"),
    (
        "train.global_batch_size: 63",
        [],
        {"DDP_HPC__RESOURCES__NODES": "2"},
        r"`resources\.nodes` came from environment DDP_HPC__RESOURCES__NODES",
    ),
]


@pytest.mark.parametrize(("text", "overrides", "environment", "told"), WRONG)
def test_what_cannot_be_is_refused_in_words(
    text: str, overrides: list[str], environment: dict[str, str], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=told):
        resolved(tmp_path, text, overrides, environment)


def test_a_missing_file_is_told_with_those_beside_it(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").touch()

    with pytest.raises(
        ConfigError, match=r"'\S*run\.yaml' does not exist\. Correct the path; the directory '\S+' has other\.yaml\."
    ):
        resolve(tmp_path / "run.yaml", [], NO_SITE)


def test_a_directory_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        resolve(tmp_path, [], NO_SITE)


def test_a_resolved_configuration_without_a_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("seed: 1")

    with pytest.raises(ConfigError, match="`name` is not set"):
        load_resolved(path)


def test_the_resolved_text_has_a_line_for_every_value_with_its_source(tmp_path: Path) -> None:
    found = resolved(tmp_path, "train: {lr: 1e-3}", ["recipe.args.size=[3, 4]"])

    lines = [line.split() for line in render_resolved(found).splitlines()]

    assert ["lr:", "0.001", "#", "file", "run.yaml"] in lines
    assert ["size:", "[3,", "4]", "#", "command", "line"] in lines
    assert ["seed:", "0", "#", "default"] in lines
    assert sum("#" in line for line in lines) == len(flat_spec(found.spec))


def test_changes_between_two_specs_are_told_key_by_key(tmp_path: Path) -> None:
    old = resolved(tmp_path, "recipe.args: {width: 3, depth: 1}").spec
    new = resolved(tmp_path, "recipe.args: {width: 3}\nseed: 7").spec

    assert changed_keys(old, new) == {"seed": "seed 0 -> 7", "recipe.args.depth": "recipe.args.depth 1 -> None"}


def test_the_first_key_of_an_open_section_is_one_change(tmp_path: Path) -> None:
    empty = resolved(tmp_path, "recipe.args: {head: {}}").spec
    full = resolved(tmp_path, "recipe.args: {head: {width: 3}}").spec
    none = resolved(tmp_path, "recipe.args: {}").spec

    assert list(changed_keys(empty, full).values()) == ["recipe.args.head.width None -> 3"]
    assert list(changed_keys(full, empty).values()) == ["recipe.args.head.width 3 -> None"]
    assert list(changed_keys(none, full).values()) == ["recipe.args.head.width None -> 3"]
    assert list(changed_keys(none, empty).values()) == ["recipe.args.head None -> {}"]


TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,8}", fullmatch=True)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
FREE = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | TEXT | st.integers(), inner, max_size=3),
    max_leaves=8,
)
PLAIN = {
    int: st.integers(min_value=1, max_value=1000),
    float: st.floats(min_value=1e-6, max_value=0.99),
    bool: st.booleans(),
    str: st.text(st.characters(codec="utf-8", exclude_characters="\n\0"), max_size=20),
}
FIXED = {
    "name": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
    "recipe.target": st.sampled_from(["image_classification", "my.module:build"]),
    "recipe.args": st.dictionaries(NAMES, FREE, max_size=4),
    "profile.kind": st.just("off"),  # a script has no profile
    "profile.steps": st.tuples(st.integers(1, 500), st.integers(500, 1000)).map(list),
    "profile.ranks": st.lists(PLAIN[int], min_size=1, max_size=3),
    "env": st.dictionaries(
        st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True),
        st.none() | st.integers() | TEXT,
        max_size=3,
    ),
    "slurm.extra": st.dictionaries(NAMES, SCALARS.filter(lambda value: "\n" not in f"{value}\0"[:-1]), max_size=3),
}
WORLD = {
    "train.global_batch_size",
    "train.micro_batch_size",
    "resources.nodes",
    "resources.workers_per_node",
    "checkpoint.min_interval_s",
    "checkpoint.max_interval_s",
}
"""Keys that must agree with one another."""


def values_of(key: Key) -> st.SearchStrategy[Any]:
    """Return values that a key takes."""
    if key.name in FIXED:
        return FIXED[key.name]
    wanted = without_none(key.annotation)
    arms = get_args(wanted)
    if wanted in PLAIN:
        values: st.SearchStrategy[Any] = PLAIN[wanted]
    elif arms and arms[-1] is Ellipsis:
        words = get_args(arms[0])
        values = st.lists(st.sampled_from(words) if words else PLAIN[arms[0]], max_size=3)
    elif arms and isinstance(arms[0], str):
        values = st.sampled_from(arms)
    elif get_origin(wanted) in {Union, UnionType}:
        values = st.one_of(*(PLAIN[arm] if arm in PLAIN else st.sampled_from(get_args(arm)) for arm in arms))
    else:
        values = st.tuples(*(PLAIN[arm] for arm in arms)).map(list)
    return values | st.none() if is_optional(key.annotation) else values


@st.composite
def some_values(draw: st.DrawFn) -> dict[str, Any]:
    """Draw values for some of the keys, those that agree with any others."""
    names = [name for name in all_keys() if name not in WORLD]
    chosen = draw(st.lists(st.sampled_from(names), unique=True, max_size=8))
    return {name: draw(values_of(all_keys()[name])) for name in chosen}


def spec_of(values: Mapping[str, Any], path: Path) -> Resolved:
    """Resolve these values from a file."""
    path.write_text("".join(f"{key}: {dump_value(value)}\n" for key, value in values.items()))
    return resolve(path, [], NO_SITE)


@given(values=some_values())
def test_what_is_rendered_is_read_back_as_the_same(
    values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("config")
    try:
        before = spec_of(values, directory / "run.yaml")
    except ConfigError:  # a value that a section refuses, such as more workers than GPUs
        return

    (directory / "config.yaml").write_text(render_resolved(before))
    after: RunSpec = load_resolved(directory / "config.yaml")

    assert after == before.spec
    assert repr(after) == repr(before.spec)  # 1 is no 1.0
    assert set(before.sources) == set(flat_spec(after))
