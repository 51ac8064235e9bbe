"""The points of a sweep: what they set, how they are named, and which are refused before anything is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.launch.sweep import point_states
from ddp_hpc.launch.sweep.point_configs import PointResolver, check_points
from ddp_hpc.launch.sweep.points import Point, make_points, parse_axis, read_points
from ddp_hpc.launch.sweep.sweep_dir import SweepDir
from ddp_hpc.run.config.resolve import Resolved, render_resolved, resolve
from ddp_hpc.run.run_dir.ledger import End, Ending, Ledger, record_end, record_start
from ddp_hpc.run.run_dir.records import QueuedJob
from tests.made_run import make_run

ENVIRON = {"HOME": "/home/somebody"}


def swept(*words: str, is_zipped: bool = False) -> list[Point]:
    return make_points([parse_axis(word) for word in words], is_zipped=is_zipped)


@pytest.mark.parametrize(
    ("word", "texts"),
    [
        ("train.lr=0.1,0.01", ("0.1", "0.01")),
        ("seed=0..4", ("0", "1", "2", "3", "4")),
        ("seed=-1..1", ("-1", "0", "1")),
        ("fold=08..10", ("08", "09", "10")),
        ("fold=0..2", ("0", "1", "2")),
        ("batch=32..128..32", ("32", "64", "96", "128")),
        ("seed=1,5..6", ("1", "5", "6")),
        ("betas=[0.9,0.99],[0.8,0.99]", ("[0.9,0.99]", "[0.8,0.99]")),
        ("title='a,b',c", ("'a,b'", "c")),
        ("note=it's,so", ("it's", "so")),
        ("lr=0.1", ("0.1",)),
        ("path=../a", ("../a",)),
    ],
)
def test_a_word_lists_the_values_of_a_key(word: str, texts: tuple[str, ...]) -> None:
    assert parse_axis(word) == (word.partition("=")[0], list(texts))


@pytest.mark.parametrize("word", ["seed", "=1", "seed=", "seed=1,,2", "seed=4..0", "seed=0..4..0", "seed=0..9999999"])
def test_a_word_without_values_is_refused_with_the_form_that_is_meant(word: str) -> None:
    with pytest.raises(ConfigError, match="--sweep"):
        parse_axis(word)


def test_a_product_changes_the_last_key_first_and_numbers_its_points() -> None:
    points = swept("train.lr=0.1,1e-5", "seed=0..1")

    assert [dict(point.settings) for point in points] == [
        {"train.lr": 0.1, "seed": 0},
        {"train.lr": 0.1, "seed": 1},
        {"train.lr": 1e-5, "seed": 0},
        {"train.lr": 1e-5, "seed": 1},
    ]
    assert [point.name for point in points] == [
        "000-lr-0.1-seed-0",
        "001-lr-0.1-seed-1",
        "002-lr-1e-05-seed-0",
        "003-lr-1e-05-seed-1",
    ]


def test_zip_takes_the_values_in_pairs_and_refuses_lists_of_unequal_lengths() -> None:
    assert [dict(point.settings) for point in swept("a=x,y", "b=1,2", is_zipped=True)] == [
        {"a": "x", "b": "1"},
        {"a": "y", "b": "2"},
    ]
    with pytest.raises(ConfigError, match="a has 2, b has 3"):
        swept("a=x,y", "b=1..3", is_zipped=True)


def test_names_are_unique_short_and_valid_whatever_the_values_are() -> None:
    strange = ["/data/a b/one.txt", "ü" * 50, "../..", "x" * 300, "1e+3", "-", "a'b"]
    points = make_points([("recipe.args.data", strange), ("env.data", ("1", "2"))])

    names = [point.name for point in points]
    assert len(set(names)) == len(names)
    for point in points:
        assert resolve_base().resolve(point).spec.name == point.name  # the spec checks it
    assert names[0] == "000-recipe.args.data-one.txt"  # a variable may hold a secret


def test_a_key_with_one_value_is_set_and_not_in_the_names() -> None:
    assert swept("train.lr=0.1", "seed=0..1")[1].name == "001-seed-1"


def test_a_thousand_points_have_numbers_of_equal_length_where_they_need_four_digits() -> None:
    assert swept("seed=0..1000")[7].name == "0007-seed-7"
    assert swept("seed=0..999")[7].name == "007-seed-7"


def test_two_equal_points_and_a_key_that_is_swept_twice_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Point 1 \(seed=1\) has the same values as point 0"):
        swept("seed=1,1")
    for words in (("seed=1", "seed=2"), ("recipe.args.x.y=1,2", "recipe.args.x=3,4")):
        with pytest.raises(ConfigError, match="swept twice"):
            swept(*words)
    with pytest.raises(ConfigError, match=r"`recipe.args.n` is 12345678901234567890123, which has more than 64 bits"):
        swept("recipe.args.n=1,12345678901234567890123")
    with pytest.raises(ConfigError, match="more than"):
        swept("seed=0..999", "train.epochs=1..1000")


def test_a_file_lists_points_and_may_name_them(tmp_path: Path) -> None:
    path = tmp_path / "points.yaml"
    path.write_text("- {train.lr: 0.1, seed: 3, name: trial-7}\n- train: {lr: 0.2}\n  seed: 4\n")

    points = make_points([parse_axis("train.epochs=1")], read_points(path))

    assert [(point.name, dict(point.settings)) for point in points] == [
        ("trial-7", {"train.lr": 0.1, "seed": 3, "train.epochs": 1}),
        ("001-lr-0.2-seed-4", {"train.lr": 0.2, "seed": 4, "train.epochs": 1}),
    ]


def test_values_of_different_types_and_orders_of_keys_are_told_apart_as_yaml_does() -> None:
    values = [1, 1.0, True, "1", None, [1], ["1"], {"a": 1, "b": 2}]

    assert len(make_points([], [{"x": value} for value in values])) == len(values)
    with pytest.raises(ConfigError, match="has the same values"):
        make_points([], [{"x": {"a": 1, "b": 2}}, {"x": {"b": 2, "a": 1}}])
    with pytest.raises(ConfigError, match="has the same name"):
        make_points([], [{"name": "a", "x": 1}, {"name": "a", "x": 2}])


def test_a_search_may_try_the_same_values_under_two_names() -> None:
    assert [
        point.name for point in make_points([], [{"name": "trial-1", "seed": 1}, {"name": "trial-2", "seed": 1}])
    ] == ["trial-1", "trial-2"]
    with pytest.raises(ConfigError, match=r"Point 1 .* has the same name as point 0"):
        make_points([], [{"name": "trial-1", "seed": 1}, {"name": "trial-1", "seed": 2}])


def test_a_point_is_not_named_like_a_file_of_its_sweep_or_by_no_name_at_all() -> None:
    made = {path.name for path in (SweepDir(Path("s")).base, SweepDir(Path("s")).ledger, SweepDir(Path("s")).logs)}
    for name in {*made, "job.sbatch", "snapshot", "snapshots"}:
        with pytest.raises(ConfigError, match="a file of its own"):
            make_points([], [{"name": name, "seed": 1}])
    for odd in (True, 1.5, ["a"]):
        with pytest.raises(ConfigError, match="neither a text nor a whole number"):
            make_points([], [{"name": odd, "seed": 1}])
    assert make_points([], [{"name": None, "seed": 1}, {"name": 17, "seed": 2}])[0].name == "000-seed-1"


@pytest.mark.parametrize("text", ["", "{a: 1}", "[]", "- 1\n", "- {}\n", "- {train.lr: 1, train: {lr: 2}}\n"])
def test_a_file_that_lists_no_points_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "points.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError, match=r"points\.yaml"):
        read_points(path)


def resolve_base(*words: str, command: tuple[str, ...] = ()) -> PointResolver:
    return PointResolver(base(*words, command=command), ENVIRON)


def base(*words: str, command: tuple[str, ...] = ()) -> Resolved:
    recipe = [] if command else ["recipe.target=ddp_hpc.train.recipes.digits:make"]
    return resolve(None, ["name=mysweep", "runs_dir=/shared/runs", *recipe, *words], ENVIRON, command=command)


def test_a_points_configuration_is_what_the_whole_command_line_would_give() -> None:
    (point,) = make_points([("train.lr", ["0.1"]), ("recipe.args.depth", ["3"]), ("seed", ["7"])])
    words = ["train.lr=0.1", "recipe.args.depth=3", "seed=7", f"name={point.name}", "runs_dir=/shared/runs/mysweep"]

    found = resolve_base("recipe.args.width=2").resolve(point)

    assert found.spec == base("recipe.args.width=2", *words).spec
    assert found.spec.path == Path("/shared/runs/mysweep", point.name)
    assert "# sweep, point 0" in render_resolved(found)


def test_points_that_share_a_section_do_not_share_what_differs_in_it() -> None:
    points = make_points(
        [], [{"recipe.args.a": 1}, {"recipe.args.b": 1}, {"recipe.args.a": 2, "seed": 1}, {"recipe.args.a": "1"}]
    )
    made = resolve_base("recipe.args.b=0")

    found = [made.resolve(point).spec.recipe.args for point in [*points, *points]]

    expected = [{"b": 0, "a": 1}, {"b": 1}, {"b": 0, "a": 2}, {"b": 0, "a": "1"}]
    assert found == [*expected, *expected]


def test_a_scripts_words_in_braces_are_replaced_and_other_braces_stay() -> None:
    command = (
        "python",
        "train.py",
        "--lr={lr}",
        "--seed",
        "{seed}",
        "--out",
        "out/{point}",
        "--json",
        '{"a": {b}}',
        "${lr}",
    )
    (point,) = make_points([("lr", ["0.10"]), ("seed", ["7"])])

    spec = resolve_base(command=command).resolve(point).spec

    assert spec.script.command[2:] == (
        "--lr=0.10",
        "--seed",
        "7",
        "--out",
        f"out/{point.name}",
        "--json",
        '{"a": {b}}',
        "${lr}",
    )
    assert spec.seed == 7  # a key of the configuration is set as well


def test_a_sweep_over_the_command_runs_each_command() -> None:
    (point,) = make_points([("script.command", ["[python, other.py]"])])

    assert resolve_base(command=("python", "train.py")).resolve(point).spec.script.command == ("python", "other.py")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.lr=0.1,-1"], r"point 1 \(train.lr=-1\)"),
        (["train.lr=0.1,fast"], r"point 1 \(train.lr=fast\)"),
        (["train.lrr=0.1"], r"point 0 \(train.lrr=0.1\)"),
        (["lr=0.1"], r"write \{lr\} in the script's command"),
        (["slurm.partition=a,b"], "`slurm.partition` cannot be swept"),
        (["resources.nodes=1,2"], "a sweep for each value of `resources.nodes`"),
        (["runs_dir=a"], "`runs_dir` cannot be swept"),
        (["point=a"], "`point` cannot be swept"),
        (["data.num_workers=0,4"], r"`data.num_workers` cannot be swept.* Or set `resources.cpus_per_worker`"),
    ],
)
def test_each_point_is_checked_and_an_error_names_it(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_points(base(), swept(*words), ENVIRON, is_array=True)


def test_points_that_run_one_after_another_may_differ_in_their_resources() -> None:
    check_points(base(), swept("resources.workers_per_node=1,2"), ENVIRON, is_array=False)
    check_points(base(), swept("data.num_workers=0,4"), ENVIRON, is_array=False)


def test_points_whose_cpus_are_set_may_differ_in_their_loader_processes() -> None:
    check_points(base("resources.cpus_per_worker=5"), swept("data.num_workers=0,4"), ENVIRON, is_array=True)


@pytest.mark.parametrize(
    ("command", "second", "named"),
    [
        (["python", "train.py", "{lr}"], {"lr": "2", "name": "a/b"}, "name"),
        (["python", "train.py", "{lr}"], {"lr": "2\0"}, "script.command"),
        (["{lr}", "train.py"], {"lr": ""}, "script.command"),
        (["python", "train.py", "{lr}"], {"lr": "2", "seed": "many"}, "seed"),
    ],
)
def test_a_point_that_is_not_valid_is_refused_also_behind_one_that_is(
    command: list[str], second: dict[str, object], named: str
) -> None:
    base = resolve(None, ["name=grid"], ENVIRON, command=command)
    points = make_points([], [{"lr": "python"}, second])

    with pytest.raises(ConfigError, match=rf"point 1 .*`{named}`"):
        check_points(base, points, ENVIRON, is_array=True)


@pytest.mark.parametrize(
    ("cancelled_at", "knows", "left"),
    [(None, True, "lost"), (5.0, True, "ended by the user"), (None, False, "ended by the user")],
)
def test_a_point_that_scancel_has_ended_goes_on_and_one_that_its_user_has_cancelled_does_not(
    cancelled_at: float | None, knows: bool, left: str, tmp_path: Path
) -> None:
    run = make_run(tmp_path)
    record_start(run, attempt=0, job_id="7")
    record_end(run, 0, End(ending=Ending.CANCELLED, exit_code=-15))
    job = QueuedJob(job_id="7", attempt=0, at=0.0, since=0, backend="slurm", cancelled_at=cancelled_at)

    assert point_states._unfinished_state(Ledger.read(run).newest, job if knows else None) == left
