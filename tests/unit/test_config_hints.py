"""What an unknown key is answered with: the key that the user meant, whichever tool the word comes from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.run.config.foreign import KEY_BY_OTHER_NAME
from ddp_hpc.run.config.keys import all_keys, is_below_open_key, is_section, key_of, unknown_key_error
from ddp_hpc.run.config.resolve import resolve


def suggested(name: str) -> list[str]:
    question = re.search(r"Did you mean (.*?)\?", str(unknown_key_error(name, "here")))
    return re.findall(r"`([^`]+)`", question[1]) if question else []


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("train.batch_size", ["train.global_batch_size"]),
        ("batch_size", ["train.global_batch_size"]),
        ("optimizer.lr", ["train.lr"]),
        ("optimizer.learning_rate", ["train.lr"]),
        ("trainer.max_epochs", ["train.epochs"]),
        ("trainer.devices", ["resources.gpus_per_node"]),
        ("gpus", ["resources.gpus_per_node"]),
        ("num_gpus", ["resources.gpus_per_node"]),
        ("num_nodes", ["resources.nodes"]),
        ("nproc-per-node", ["resources.workers_per_node"]),
        ("partition", ["slurm.partition"]),
        ("slurm.time", ["resources.time_limit_min"]),
        ("time", ["resources.time_limit_min"]),
        ("slurm.mem", ["resources.mem_gb"]),
        ("fp16", ["train.precision"]),
        ("save_steps", ["checkpoint.every_steps"]),
        ("train.num_workers", ["data.num_workers"]),
        ("train.weight_decay", ["optimizer.weight_decay"]),
        ("train.every_steps", ["log.every_steps", "checkpoint.every_steps", "integrity.every_steps"]),
        ("optimiser.name", ["optimizer.name"]),
        ("train.lrr", ["train.lr"]),
        ("epoch", ["train.epochs"]),
        ("NCCL_DEBUG", ["env.NCCL_DEBUG"]),
        ("slurm.NCCL_SOCKET_IFNAME", ["network.interfaces"]),
        ("zzz", []),
    ],
)
def test_the_key_that_was_meant_is_named(typed: str, meant: list[str]) -> None:
    assert suggested(typed) == meant


def test_every_word_of_another_tool_leads_to_a_key_and_none_is_a_key_itself() -> None:
    assert all(key in all_keys() and key_of(key) for key in KEY_BY_OTHER_NAME.values())
    assert not KEY_BY_OTHER_NAME.keys() & all_keys().keys()


def test_a_word_where_a_section_stands_is_told_the_key_below_it(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("")

    with pytest.raises(
        ConfigError, match=r"`optimizer` is 'adamw' .* set the keys below it, such as `optimizer\.name`\."
    ):
        resolve(tmp_path / "run.yaml", ["optimizer=adamw"], {"DDP_HPC_SITE_PROFILE": ""})


def test_what_is_above_a_key_is_a_section_and_only_an_open_key_may_have_names_below_it() -> None:
    for name, key in all_keys().items():
        parents = [name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1)]
        assert all(map(is_section, parents))
        assert is_section(name) is is_below_open_key(f"{name}.invented") is key.is_open
        assert not is_below_open_key(name)
    assert not is_section("")
    assert not is_section("train.")
