"""The reference of all keys, and its copy in docs/."""

from __future__ import annotations

from pathlib import Path

import pytest

import ddp_hpc
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.run.config.keys import all_keys
from ddp_hpc.run.config.reference import as_markdown, reference_rows, rows_of

DOCUMENT = Path(ddp_hpc.__file__).parents[1] / "docs/configuration.md"


def test_every_key_has_a_type_a_default_and_a_meaning() -> None:
    rows = reference_rows()

    assert [row["key"] for row in rows] == list(all_keys())
    assert [row["key"] for row in rows if not all(row.values())] == []


def test_a_row_tells_a_key_in_words() -> None:
    assert rows_of("train.max_steps") == [
        {
            "key": "train.max_steps",
            "type": "a whole number, or null",
            "default": "null",
            "meaning": "Stop after this many optimizer steps, even within an epoch.",
        }
    ]


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("", list(all_keys())),
        ("recipe", ["recipe.target", "recipe.args"]),
        ("recipe.args.width", ["recipe.args"]),
        ("seed", ["seed"]),
    ],
)
def test_rows_can_be_had_by_section_and_by_key(name: str, keys: list[str]) -> None:
    assert [row["key"] for row in rows_of(name)] == keys


def test_an_unknown_key_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean `checkpoint\.keep_last`"):
        rows_of("checkpoint.kep_last")


def test_the_reference_in_docs_is_that_of_the_code() -> None:
    """Where this fails, put the output of `ddp-hpc config --markdown` between the two markers."""
    _, _, rest = DOCUMENT.read_text(encoding="utf-8").partition("<!-- keys: begin -->\n")

    written, end, _ = rest.partition("<!-- keys: end -->")

    assert end
    assert written == as_markdown(reference_rows())
