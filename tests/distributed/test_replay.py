"""Steps that were computed come out the same again, and the first difference between two runs is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.run.checkpoints import checkpoint_store
from ddp_hpc.run.checkpoints.checkpoint_names import MANIFEST_NAME, checkpoint_path
from ddp_hpc.run.checkpoints.shards import parse_header
from ddp_hpc.run.run_dir.paths import RunDir
from tests.distributed.planted import PLANTED, Planted, bisected, command, is_right, make_code, train
from tests.distributed.whole_runs import Workplace, make_workplace

CONFIG = """
recipe: {target: "trial_recipe:build", args: {num_samples: 100}}
train: {global_batch_size: 12, lr: 0.01, ema_decay: 0.9, grad_clip_norm: 1.0, record_samples: true}
optimizer: {name: adamw}
log: {every_steps: 5}
integrity: {every_steps: 4}
checkpoint: {every_steps: 10, keep_last: 2}
notify: {command: [/bin/sh, -c, "echo $DDP_HPC_EVENT >> ../told"]}
"""


def planted(name: str) -> Planted:
    return next(one for one in PLANTED if one.name == name)


def content_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return each file below a directory, with its content and the time of its last change."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def answer_of(text: str) -> Any:
    return json.loads(text)


@pytest.mark.long
def test_the_step_the_sample_and_the_tensor_are_named_in_which_two_runs_part(tmp_path: Path) -> None:
    case = planted("label of one sample")
    one = train(tmp_path / "one", "one", None, ranks=1)
    other = train(tmp_path / "other", "other", case, ranks=1)

    answer = bisected(one, other)

    assert is_right(case, answer), answer
    assert answer["num_replays"] == 2
    assert answer["circumstances"]["code"][0]["lines"] == ["-RELABELLED = -1", "+RELABELLED = 57"]


@pytest.mark.long
def test_a_run_that_changed_its_world_and_its_batch_comes_out_the_same_and_is_not_touched(tmp_path: Path) -> None:
    workplace = make_workplace(tmp_path, CONFIG)
    workplace.finish("run", "train.max_steps=7", "resources.workers_per_node=2")
    workplace.finish("run", "train.max_steps=16", "resources.workers_per_node=1", "train.global_batch_size=6")
    before, told = content_of(workplace.run("run").path), content_of(tmp_path / "runs")

    done = workplace.command("replay", "run", "--from", "0", "--json")

    answer = answer_of(done.stdout)
    assert (done.returncode, answer["verdict"], answer["tolerance"]) == (0, "the same", 0), done.stderr
    assert (answer["started_at"], answer["world_sizes"], answer["num_steps_with_samples"]) == (0, [2, 1], 16)
    assert answer["num_losses"] > 2
    assert answer["num_digests"] > 3
    assert answer["checkpoints"] == [10, 16]
    assert content_of(workplace.run("run").path) == before
    assert content_of(tmp_path / "runs") == told


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """Return a workplace with the finished run `run` of 36 steps on two ranks, in bf16 with accumulation."""
    workplace = make_workplace(tmp_path_factory.mktemp("trained"), CONFIG)
    more = ["train.precision=bf16", "train.micro_batch_size=3", "checkpoint.keep_last=9"]
    workplace.finish("run", "train.max_steps=36", "resources.workers_per_node=2", *more)
    return workplace


@pytest.mark.long
def test_steps_between_checkpoints_begin_at_the_newest_one_and_leave_a_trace_for_each_rank(trained: Workplace) -> None:
    done = trained.command("replay", "run", "--from", "23", "--to", "26", "--trace", "--json")

    answer = answer_of(done.stdout)
    private = RunDir(Path(answer["directory"]))
    lines = [json.loads(line) for line in private.rank_trace(1).read_text().splitlines()]
    steps = [line["step"] for line in lines if "entries" in line]
    kinds = [entry["kind"] for entry in lines[1]["entries"]]
    assert (done.returncode, answer["started_at"], answer["num_losses"]) == (0, 20, 1)
    assert steps == [23, 24, 25, 26]
    assert [*dict.fromkeys(kinds)] == [
        *("samples", "random generator", "batch", "output", "loss", "gradient", "buffer", "summed gradient"),
        *("used gradient", "option", "moment", "weight", "average", "of the rank"),
    ]
    assert kinds.count("samples") == 2


@pytest.mark.long
def test_with_another_world_losses_are_compared_with_a_tolerance_and_that_is_said(trained: Workplace) -> None:
    done = trained.command("replay", "run", "--from", "0", "--to", "12", "--world", "1", "--tolerance", "0.5", "--json")

    answer = answer_of(done.stdout)
    assert (done.returncode, answer["verdict"], answer["tolerance"], answer["world_sizes"]) == (0, "the same", 0.5, [1])
    assert answer["checkpoints"] == []
    assert any("another order" in note for note in answer["notes"])


def forge(path: Path, name: str) -> None:
    """Change a number of a tensor in a checkpoint, and all checksums accordingly."""
    manifest = checkpoint_store.read_manifest(path)
    records = list(manifest.shards)
    for number, record in enumerate(records):
        shard = path / record.file
        content = bytearray(shard.read_bytes())
        header = content[: 8 + int.from_bytes(content[:8], "little")]
        for entry in parse_header(shard, bytes(header), len(content)):
            if entry.name == name:
                content[entry.begin + 2] ^= 1
        shard.unlink()
        parts = [bytes(header), bytes(content[len(header) :])]
        records[number] = checkpoint_store.write_shard(shard, parts, size=len(content))
    forged = checkpoint_store.Manifest(**{**vars(manifest), "shards": tuple(records)})
    (path / MANIFEST_NAME).write_bytes(checkpoint_store.manifest_bytes(forged))


@pytest.mark.long
def test_a_checkpoint_whose_content_and_checksums_were_changed_fails_the_audit_on_both_sides(
    trained: Workplace,
) -> None:
    trained.finish("tampered", "train.max_steps=36", "resources.workers_per_node=2", "checkpoint.keep_last=9")
    forge(checkpoint_path(trained.run("tampered"), 20), "model/head.weight")

    done = trained.command("audit", "tampered", "--segments", "9", "--seed", "1", "--json")

    answer = answer_of(done.stdout)
    found = {(one["start"], one["end"]): one["verdict"] for one in answer["segments"]}
    assert (done.returncode, answer["verdict"]) == (1, "FAIL")
    assert found == {(0, 10): "the same", (10, 20): "different", (20, 30): "different", (30, 36): "the same"}
    assert answer["num_steps"] == 16


@pytest.mark.long
def test_code_that_was_edited_since_shows_as_a_run_that_does_not_come_out_the_same(tmp_path: Path) -> None:
    run = train(tmp_path / "code", "run", None, ranks=1)
    make_code(tmp_path / "code", planted("activation"))
    kept = make_code(tmp_path / "kept").parent

    edited = command("replay", str(run), "--to", "20", cwd=tmp_path, code=1)
    original = command("replay", str(run), "--to", "20", "--code", str(kept), cwd=tmp_path)

    assert "DIFFERENT" in edited
    assert "planted_recipe.py has changed since" in edited
    assert "the same to the bit" in original


@pytest.mark.long
def test_between_records_that_are_far_apart_the_step_is_found_with_four_replays(tmp_path: Path) -> None:
    case = planted("bit flip")
    rare = (
        "log.every_steps=1000",
        "integrity.every_steps=null",
        "checkpoint.every_steps=1000",
        "train.record_samples=false",
    )
    case = Planted(**{**vars(case), "settings": rare})
    none = Planted(name="none", step=0, first=("", ""), settings=rare)
    one = train(tmp_path / "one", "one", none, ranks=1)
    other = train(tmp_path / "other", "other", case, ranks=1)

    answer = bisected(one, other)

    assert is_right(case, answer), answer
    assert answer["num_replays"] == 4
    assert answer["same_up_to"] == 36
