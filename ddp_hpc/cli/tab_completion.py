"""The words that the tab key can complete."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, get_args, get_origin

from ddp_hpc.cli import VERBS
from ddp_hpc.cli.runs import chosen_runs_dir
from ddp_hpc.watch.find import list_runs

_UNQUOTED_WORD = re.compile(r"[\w.,:=/@%+-]*")
_VERBS_WITH_SETTINGS = frozenset({"submit", "render", "drill", "container"})


def completions(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return what the last word may become; none where it may be a file.

    Words are those after `ddp-hpc`. bash takes the `=` of a setting for a word of its own, zsh and fish do not.
    """
    *before, word = words or [""]
    if not before:
        return _words_beginning(word, VERBS)
    if before[0] not in VERBS:
        return []
    if word == "=" or before[-1] == "=":
        key = before[-1] if word == "=" else before[-2]
        return _words_beginning(word.removeprefix("="), _values_of_key(key.removeprefix("--")))
    return _words_beginning(word, _fitting_words(before, word, environment))


def _fitting_words(before: Sequence[str], word: str, environment: Mapping[str, str]) -> Iterable[str]:
    """Return all words that can stand in the place of `word`; the caller keeps those that begin with it."""
    parser = argparse.ArgumentParser()
    importlib.import_module(f"ddp_hpc.cli.verbs.{before[0]}").add_arguments(parser)
    actions = parser._actions  # noqa: SLF001  # argparse has no public list of them
    key, equals, _ = word.partition("=")
    asked = next((action for action in actions if before[-1] in action.option_strings and action.nargs != 0), None)
    if equals:
        return [f"{key}={value}" for value in _values_of_key(key.removeprefix("--"))]
    if asked is not None:
        return map(str, asked.choices or ())
    if word.startswith("-"):
        return [option for action in actions for option in action.option_strings]
    return _positional_words(before, word, actions, environment)


def _words_beginning(word: str, found: Iterable[str]) -> list[str]:
    # Nothing that a shell would run: whoever may write to the directory of runs chooses their names.
    return [one for one in found if one.startswith(word) and _UNQUOTED_WORD.fullmatch(one)]


def _positional_words(
    before: Sequence[str], word: str, actions: Sequence[argparse.Action], environment: Mapping[str, str]
) -> Iterable[str]:
    places = [action for action in actions if not action.option_strings]
    named = [str(choice) for action in places for choice in action.choices or ()]
    if any(action.metavar == "RUN" for action in places):
        runs_dir, sweep = chosen_runs_dir(None, environment), word[: word.rfind("/") + 1]
        named += [f"{sweep}{run.name}" for run in list_runs(runs_dir / sweep)]
    if before[0] == "config":
        named += _config_keys()
    is_file = not word and not any(one.endswith((".yaml", ".yml")) for one in before)
    if before[0] in _VERBS_WITH_SETTINGS and not is_file:
        named += [f"{key}=" for key in _config_keys()]
    return named


def _config_keys() -> list[str]:
    from ddp_hpc.run.config.keys import all_keys  # late: the spec's classes take 30 ms to make

    return list(all_keys())


def _values_of_key(name: str) -> list[str]:
    from ddp_hpc.base.field_types import without_none
    from ddp_hpc.run.config.keys import key_of

    key = key_of(name)
    wanted = None if key is None else without_none(key.annotation)
    if get_origin(wanted) is Literal:
        return list(map(str, get_args(wanted)))
    return ["true", "false"] if wanted is bool else []
