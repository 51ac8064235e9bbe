"""What texts of a run show: secrets are masked, the rest stays."""

from __future__ import annotations

import time

import pytest

from ddp_hpc.base.discretion import mask_secrets, secret_values
from ddp_hpc.watch.why.lines import clean


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("401 of https://bob:hunter2@hub/api?token=abc123&page=2", "401 of https://bob:***@hub/api?token=***&page=2"),
        ("GET https://hub/blob?sig=Zm9v&key=1", "GET https://hub/blob?sig=***&key=***"),
        ("{'Authorization': 'Bearer abcdefgh1234'}", "{'Authorization': 'Bearer ***'}"),
        ('{"api_key": "abc", "name": "x"}', '{"api_key": "***", "name": "x"}'),
        ("WANDB_API_KEY=0123abcd python", "WANDB_API_KEY=*** python"),
        ("token hf_abcdefghijklmnop is wrong", "token *** is wrong"),
        ("xoxb-1234-abcdefghijkl is wrong", "*** is wrong"),
        ("to https://hooks.slack.com/services/T0/B0/xyz.", "to https://hooks.slack.com/services/***"),
    ],
)
def test_what_looks_like_a_secret_is_masked(text: str, shown: str) -> None:
    assert mask_secrets(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "KeyError: 'model.weight'",
        "Missing key(s) in state_dict: a.b",
        "num_tokens: 5, tokenizer=gpt2, author=me",
        "https://host:8080/path@2",
        "key: train.lr=0.1; sk-learn",
        "rank 3 on node01: killed by SIGKILL",
    ],
)
def test_other_words_stay(text: str) -> None:
    assert mask_secrets(text) == text


def test_values_of_variables_and_keys_that_may_be_secrets_are_found_wherever_they_stand() -> None:
    found = secret_values(
        {"env.HF_TOKEN": "hf-of-the-run", "train.lr": 0.1, "name": "digits"},
        {"WANDB_API_KEY": "0123456789", "HOME": "/home/me", "SHORT_TOKEN": "1", "NCCL_DEBUG": "INFO"},
    )

    assert found == ["hf-of-the-run", "0123456789"]
    assert mask_secrets("login failed for (0123456789)", found) == "login failed for (***)"


@pytest.mark.parametrize("part", ["a.", "a-", "token.", "'a.", "://a:", "\x1b]", "\x1b[", "[rank1]: "])
def test_the_time_for_a_long_line_grows_as_the_line(part: str) -> None:
    """A quarter of a MB of one of these took minutes."""
    began = time.process_time()

    mask_secrets(part * (2**18 // len(part)))
    clean(part * (2**18 // len(part)))

    assert time.process_time() - began < 2
