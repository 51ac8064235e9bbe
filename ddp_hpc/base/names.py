"""Names in messages: the first of many, how many there are, and which known one a misspelled one may mean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal


def shorten_names(names: Sequence[str], most: int, *, between: Literal[", ", "; "] = ", ") -> str:
    """Return all names or phrases, or the first ones and how many there are more: `node1, node2 and 7 more`."""
    more = f"{between.strip(', ')} and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more


def plural(count: int, one: str) -> str:
    """Return `1 node` or `2 nodes`."""
    return f"{count:,} {one}{'' if count == 1 else 's'}"


def near_names(word: str, words: Iterable[str], *, cutoff: float = 0.5) -> list[str]:
    """Return up to three of `words` that are spelled most like `word`, the nearest first."""
    import difflib  # late: only an error needs it

    return difflib.get_close_matches(word, list(words), n=3, cutoff=cutoff)


def nearest(word: str, words: Iterable[str]) -> str | None:
    """Return the one of `words` that is spelled most like `word`, or None if none is near."""
    return next(iter(near_names(word.lower(), words, cutoff=0.7)), None)


def did_you_mean(word: str, words: Iterable[str], *, cutoff: float = 0.5) -> str:
    """Return `Did you mean 'build'? `; empty where none is near."""
    near = near_names(word, words, cutoff=cutoff)
    return f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
