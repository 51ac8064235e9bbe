"""Runs that are odd to compute again: odd models, data that is gone, code that is not deterministic, damaged checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.run.checkpoints.checkpoint_names import checkpoint_path
from tests.distributed.whole_runs import Workplace

HERE = Path(__file__).parent
CONFIG = """
recipe: {target: "odd_recipe:build"}
train: {max_steps: 24, global_batch_size: 8, lr: 0.01}
optimizer: {name: adamw}
log: {every_steps: 5}
checkpoint: {every_steps: 10, keep_last: 9}
"""
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    path = tmp_path_factory.mktemp("odd")
    (path / "odd_recipe.py").symlink_to(HERE / "odd_recipe.py")
    (path / "trial.yaml").write_text(CONFIG)
    made = Workplace(path)
    made.finish("plain")
    return made


def asked(workplace: Workplace, *words: str, code: int) -> Any:
    done = workplace.command(*words, "--json")
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return json.loads(done.stdout)


def test_mappings_nested_outputs_and_a_layer_that_is_called_twice_are_traced(workplace: Workplace) -> None:
    workplace.finish("fp16", "train.precision=fp16")

    answer = asked(workplace, "replay", "fp16", "--from", "0", "--to", "3", "--trace", code=2)

    lines = Path(answer["directory"], "trace", "rank-0.jsonl").read_text().splitlines()
    first = json.loads(lines[1])["entries"]
    names = [entry["name"] for entry in first if entry["kind"] == "output"]
    assert answer["verdict"] == "not compared"
    assert names == ["embed", "twice", "twice", "head.0", "head", "(the model).logits", "(the model).pair[0]"]
    assert [entry["name"] for entry in first if entry["kind"] == "batch"] == ["inputs.words", "targets"]
    assert not any("unused" in entry["name"] for entry in first if entry["kind"] == "gradient")
    assert any(entry["name"] == "loss scale" for entry in first)


def test_code_that_is_not_deterministic_does_not_pass(workplace: Workplace) -> None:
    workplace.finish("noisy", "recipe.args.is_random=true")

    answer = asked(workplace, "audit", "noisy", "--segments", "9", code=1)

    assert {one["verdict"] for one in answer["segments"]} == {"different"}
    assert answer["num_steps"] == 0


def test_a_damaged_checkpoint_is_named_and_the_steps_after_it_are_computed_from_an_older_one(
    workplace: Workplace,
) -> None:
    workplace.finish("damaged")
    shard = next(checkpoint_path(workplace.run("damaged"), 10).glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.chmod(0o600)
    shard.write_bytes(content)

    answer = asked(workplace, "audit", "damaged", "--segments", "9", code=1)

    assert [one["verdict"] for one in answer["segments"]] == ["damaged", "the same", "the same"]
    assert "step-00000010" in answer["segments"][0]["problem"]
    assert checkpoint_path(workplace.run("damaged"), 10).exists()


def test_data_that_is_gone_is_named_and_the_log_stays(workplace: Workplace) -> None:
    data = workplace.path / "data.txt"
    data.write_text("")
    workplace.finish("data", f"recipe.args.path={data}")
    data.unlink()

    done = workplace.command("replay", "data")

    assert done.returncode == 2
    assert f"No such file or directory: '{data}'" in done.stderr
    log = Path(done.stderr.split("The replay's log is ")[1].partition(".\n")[0])
    assert log.is_file()
    assert f"{log.parents[2]} is kept" in done.stderr


def test_a_run_that_was_moved_to_a_path_that_no_run_may_have_is_computed_again(workplace: Workplace) -> None:
    moved = workplace.path / "my archive" / "final run (v2)"
    shutil.copytree(workplace.run("plain").path, moved, symlinks=True)

    assert asked(workplace, "replay", str(moved), "--from", "10", "--to", "20", code=0)["verdict"] == "the same"


def test_a_recipe_knows_that_its_steps_are_computed_again(workplace: Workplace) -> None:
    said = workplace.path / "said.txt"
    workplace.finish("told", f"recipe.args.says={said}", "train.max_steps=5")
    first = said.read_text()

    asked(workplace, "replay", "told", "--from", "0", code=0)

    assert (first, said.read_text()) == ("None", "1")


def test_a_damaged_checkpoint_in_the_steps_is_no_difference(workplace: Workplace) -> None:
    workplace.finish("torn")
    manifest = checkpoint_path(workplace.run("torn"), 20) / "manifest.json"
    manifest.chmod(0o600)
    manifest.write_bytes(manifest.read_bytes()[:-9])

    done = workplace.command("replay", "torn", "--from", "10", "--to", "20")

    assert done.returncode == 2
    assert "The steps could not be compared" in done.stderr


def test_two_models_part_before_the_first_step_and_two_worlds_in_their_samples(workplace: Workplace) -> None:
    workplace.finish("deeper", "recipe.args.sizes=1")
    workplace.finish("wider", "resources.workers_per_node=2", "train.find_unused_parameters=true")

    deeper = asked(workplace, "bisect", "plain", "deeper", code=1)
    wider = asked(workplace, "bisect", "plain", "wider", code=1)

    assert deeper["parting"]["first"]["step"] == 0
    assert deeper["circumstances"]["configuration"] == ["recipe.args.sizes None -> 1"]
    assert (wider["parting"]["first"]["step"], wider["parting"]["first"]["kind"]) == (1, "samples")
    assert wider["parting"]["tensor"]["name"] == "inputs.words"
    assert wider["circumstances"]["world"] == "1 ranks -> 2"


def test_a_run_is_the_same_as_itself_without_a_replay_and_as_its_twin(workplace: Workplace) -> None:
    workplace.finish("twin", "log.every_steps=7")

    itself = asked(workplace, "bisect", "plain", "plain", code=0)
    twin = asked(workplace, "bisect", "plain", "twin", code=0)

    assert (itself["num_replays"], itself["same_up_to"]) == (0, 24)
    assert (twin["num_replays"], twin["same_up_to"]) == (0, 24)


def test_a_runs_script_and_steps_that_are_not_there_are_refused(workplace: Workplace) -> None:
    (workplace.path / "train.py").write_text("print('done')\n")
    done = workplace.command("submit", "name=script", "--wait", "--", "python", "train.py")
    assert done.returncode == 0, done.stderr

    script = workplace.command("replay", "script")
    beyond = workplace.command("replay", "plain", "--to", "500")

    assert (script.returncode, beyond.returncode) == (2, 2)
    assert "Only runs of a recipe can be computed again" in script.stderr
    assert "newest step on record of plain is 24" in beyond.stderr


def test_a_run_that_starts_from_another_runs_weights_finds_them_again(workplace: Workplace) -> None:
    workplace.finish("tuned", "train.init_from=plain")

    assert asked(workplace, "replay", "tuned", "--from", "0", code=0)["verdict"] == "the same"


def processes_that_name(text: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        found += [words] if text in words else []
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    "words", [("replay", "plain", "--from", "0"), ("bisect", "plain", "seeded"), ("audit", "plain")]
)
def test_a_command_that_is_interrupted_leaves_no_process_and_no_folder(
    workplace: Workplace, tmp_path: Path, words: tuple[str, ...], number: signal.Signals
) -> None:
    if words[0] == "bisect" and not workplace.run("seeded").path.exists():
        workplace.finish("seeded", "seed=5")
    asking = subprocess.Popen(
        [sys.executable, "-m", "ddp_hpc", *words],
        cwd=workplace.path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not [*tmp_path.glob("*/**/console*")]:
        assert asking.poll() is None
        time.sleep(0.05)

    asking.send_signal(number)

    assert asking.wait(60) != 0
    assert processes_that_name(str(tmp_path)) == []
    assert [*tmp_path.iterdir()] == []
