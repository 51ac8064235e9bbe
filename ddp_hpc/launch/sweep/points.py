"""The points of a sweep: the values that `--sweep KEY=VALUES` lists, what each point sets, and its name. Pure, except for `read_points`."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from ddp_hpc.base.discretion import HIDDEN, is_key_shown
from ddp_hpc.base.durable import json_object
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.run.config.keys import is_below, is_section, key_of, parse_text

_RANGE_PATTERN = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(\d+))?", re.ASCII)
_KEY_PATTERN = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
_OPENING, _CLOSING, _QUOTES = "[{", "]}", "'\""
MOST_POINTS = 100_000
"""A range or a product of more is an error of the user's, and would fill this process's memory."""
_NAME_UNSAFE_PATTERN = re.compile(r"[^A-Za-z0-9._-]+")
_MOST_VALUE_CHARS = 24
_MOST_NAME_CHARS = 96
_FEWEST_DIGITS = 3
_SCALAR_TYPES = frozenset({bool, int, float, str, type(None)})
_RESERVED_FILE_NAMES = frozenset({"base.yaml", "job.sbatch", "logs", "snapshot", "snapshots", "sweep.jsonl"})
"""What a sweep's directory holds beside the runs of its points."""


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    number: int
    """From 0 on, in the order of the sweep; it never changes."""
    name: str
    """The run's name."""
    settings: Mapping[str, Any]
    """Key -> value: keys of the configuration, and words that stand in braces in a script's command."""

    def __str__(self) -> str:
        """Return `point 3 (train.lr=0.1, seed=2)`, without values that may be secrets."""
        return f"point {self.number} ({', '.join(f'{key}={as_text(value)}' for key, value in self.shown_settings.items())})"

    @property
    def shown_settings(self) -> dict[str, Any]:
        """The settings as output may show them, without values that may be secrets."""
        return {key: value if _is_shown(key, value) else HIDDEN for key, value in self.settings.items()}


def parse_axis(word: str) -> tuple[str, list[str]]:
    """Return the key and the values of `train.lr=0.1,0.01`, `seed=0..4` (with both ends) or `batch=32..128..32` (with a step).

    A comma within brackets or quotes divides nothing: `train.betas=[0.9,0.99],[0.8,0.99]` has two values.
    """
    key, equals, text = word.partition("=")
    if equals and not is_key_shown(key, text):
        word = f"{key}=..."  # in errors: the values may be secrets
    if not equals or _KEY_PATTERN.fullmatch(key) is None:
        raise ConfigError(f"`--sweep {word}` is not of the form KEY=VALUE,VALUE,... such as `train.lr=0.1,0.01`.")
    texts = [each for part in _split_at_commas(text) for each in _expand_range(part, word)]
    if any(not each for each in texts):
        raise ConfigError(
            f"`--sweep {word}` has an empty value. Remove the comma that is too much; a text without characters stands in a file: `--points`."
        )
    return key, texts


def _split_at_commas(text: str) -> list[str]:
    """Return the parts between the commas that stand outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in _QUOTES and (depth or not parts[-1].strip()):  # else an apostrophe within a text
            quote = character
        elif character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth -= 1
        elif character == "," and depth <= 0:
            parts.append("")
            continue
        parts[-1] += character
    return [part.strip() for part in parts]


def _expand_range(part: str, word: str) -> list[str]:
    """Return the whole numbers of a range, its end included; another text as it is."""
    match = _RANGE_PATTERN.fullmatch(part)
    if match is None:
        return [part]
    first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
    if last < first or step == 0:
        raise ConfigError(
            f"`--sweep {word}` has the range {part!r}, which holds no number. Write FIRST..LAST or FIRST..LAST..STEP, with FIRST "
            "not above LAST and a STEP of at least 1."
        )
    if (last - first) // step >= MOST_POINTS:
        raise ConfigError(
            f"`--sweep {word}` has the range {part!r}, which holds more than {MOST_POINTS} numbers. Sweep fewer values."
        )
    width = len(match[1]) if match[1].startswith("0") else 0  # `00..12` has `00`, `01`
    return [f"{number:0{width}}" for number in range(first, last + 1, step)]


def _is_shown(key: str, value: Any) -> bool:
    """Tell whether names and output may show the value of a key; a mapping is not shown where one of its parts is not."""
    if isinstance(value, Mapping):
        return all(_is_shown(f"{key}.{part}", one) for part, one in value.items())
    if isinstance(value, (list, tuple)):
        return all(_is_shown(key, one) for one in value)
    return is_key_shown(key, value)


def make_points(
    axes: Sequence[tuple[str, Sequence[str]]], listed: Sequence[Mapping[str, Any]] = (), *, is_zipped: bool = False
) -> list[Point]:
    """Return each combination of the axes' values, the last axis changing first. An axis is a key, and the texts of its values.

    With `is_zipped`: the first values of all axes together, then the second ones. `listed` are points of a file; each of them
    is combined with all of the axes' points.
    """
    names = [name for name, _ in axes]
    twice = [
        name
        for name in names
        if names.count(name) > 1
        or any(name != one and is_below(name, one) for one in names)
        or any(name in each for each in listed)
    ]
    if twice:
        raise ConfigError(
            f"`{twice[0]}` is swept twice. List all of its values in one place: `--sweep {twice[0]}=A,B,C`."
        )
    if "name" in names:
        raise ConfigError("`name` cannot be swept: it is made from what the points set. A file of points may set it.")
    found = [None if is_section(name) else key_of(name) for name in names]
    chosen: list[dict[str, Any]] = [
        {  # as a file would have it; a script's word stays the text that it is
            name: text if key is None else parse_text(key, text, f"--sweep {name}")
            for name, key, text in zip(names, found, texts, strict=True)
        }
        for texts in _combinations(axes, is_zipped=is_zipped)
    ]
    of_file = [_with_checked_name(each) for each in listed] or [{}]
    if len(of_file) * len(chosen) > MOST_POINTS:
        raise ConfigError(
            f"The sweep has {len(of_file) * len(chosen)} points, but at most {MOST_POINTS} are allowed. Sweep fewer values."
        )
    all_settings = [{**first, **second} for first in of_file for second in chosen]
    points = [
        Point(number, name, {key: _as_recorded(key, value) for key, value in settings.items() if key != "name"})
        for number, (name, settings) in enumerate(zip(_point_names(all_settings), all_settings, strict=True))
    ]
    named = {number for number, settings in enumerate(all_settings) if "name" in settings}
    _refuse_duplicates(points, named)
    return points


def _as_recorded(key: str, value: Any) -> Any:
    if json_object(json.dumps({key: value}, default=str)) is not None:
        return value
    if key_of(key) is None and not is_section(key):  # a word of the script
        return as_text(value)
    raise ConfigError(
        f"`{key}` is {as_text(value)}, which has more than 64 bits, so the sweep's record cannot hold it. Set a smaller number."
    )


def _with_checked_name(listed: Mapping[str, Any]) -> dict[str, Any]:
    """Return a point of a file; with `name: null`, it gets a name as if it had none."""
    name = listed.get("name")
    if name is None:
        return {key: value for key, value in listed.items() if key != "name"}
    if isinstance(name, bool) or not isinstance(name, (str, int)):
        raise ConfigError(
            f"A point has the name {as_text(name)}, which is neither a text nor a whole number. Write it in quotes."
        )
    if str(name) in _RESERVED_FILE_NAMES:
        raise ConfigError(
            f"A point has the name {name!r}, but the sweep's directory has a file of its own with this name. Choose another one."
        )
    return dict(listed)


def _combinations(axes: Sequence[tuple[str, Sequence[str]]], *, is_zipped: bool) -> list[tuple[str, ...]]:
    all_texts = [texts for _, texts in axes]
    if not is_zipped:
        if math.prod(map(len, all_texts)) > MOST_POINTS:
            raise ConfigError(f"The sweep has more than {MOST_POINTS} points. Sweep fewer values.")
        return list(itertools.product(*all_texts))
    if len(set(map(len, all_texts))) > 1:
        found = ", ".join(f"{key} has {len(texts)}" for key, texts in axes)
        raise ConfigError(
            f"`--zip` takes one value of each key for a point, but {found}. List as many values for each."
        )
    return list(zip(*all_texts, strict=True)) or [()]


def _refuse_duplicates(points: Sequence[Point], named: AbstractSet[int]) -> None:
    """Refuse two points of the same name, or of the same settings; a search names its points, and may try the same settings twice."""
    names: dict[str, Point] = {}
    settings: dict[tuple[tuple[str, str], ...], Point] = {}
    for point in points:
        found = {"has the same name": names.setdefault(point.name, point)}
        if point.number not in named:
            found["has the same values"] = settings.setdefault(settings_as_key(point.settings), point)
        for what, first in found.items():
            if first is not point:
                raise ConfigError(
                    f"P{str(point)[1:]} {what} as {first}. Give each point other values, or another name."
                )


def settings_as_key(settings: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return what is equal for equal settings, and can be a key of a dictionary."""
    return tuple(sorted((key, _distinct_text(value)) for key, value in settings.items()))


def _distinct_text(value: Any) -> str:
    """Return a text that differs for different values: 1, 1.0, true and "1" are four."""
    # A sweep compares thousands of values, most of them scalars: of those, JSON takes ten times as long.
    return repr(value) if type(value) in _SCALAR_TYPES else json.dumps(value, sort_keys=True, default=str)


def _point_names(all_settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return `003-lr-0.1-seed-2` for each point: the number, and the settings that differ between points."""
    labels = key_labels(all_settings)
    digits = max(_FEWEST_DIGITS, len(str(len(all_settings) - 1)))
    names = []
    for number, settings in enumerate(all_settings):
        if "name" in settings:
            names.append(str(settings["name"]))
            continue
        parts = [
            f"{labels[key]}-{_value_in_name(settings[key])}"
            for key in settings
            if key in labels and _is_shown(key, settings[key])
        ]
        text = _NAME_UNSAFE_PATTERN.sub("-", "-".join([f"{number:0{digits}}", *parts]))
        names.append(text[:_MOST_NAME_CHARS].rstrip("-._"))
    return names


def key_labels(all_settings: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the keys in which the settings of points differ, each with a short name."""
    keys = dict.fromkeys(key for settings in all_settings for key in settings if key != "name")
    last = [key.rpartition(".")[2] for key in keys]
    return {
        key: label if last.count(label) == 1 else key  # the whole key where two have the same last part
        for key, label in zip(keys, last, strict=True)
        if len({_distinct_text(settings.get(key)) for settings in all_settings}) > 1
    }


def _value_in_name(value: Any) -> str:
    """Return a value in a name: a path's last part, `1e+3` as `1e3`."""
    text = as_text(value)
    text = PurePath(text).name if "/" in text else text
    return text.replace("+", "").strip("[]{}'\" ")[:_MOST_VALUE_CHARS]


def as_text(value: Any) -> str:
    """Return a value as JSON has it, and a text as it is."""
    if type(value) is int or (type(value) is float and math.isfinite(value)):
        return repr(value)  # ten times as fast as JSON
    return value if isinstance(value, str) else json.dumps(value, default=str)


def read_points(path: Path) -> list[dict[str, Any]]:
    """Read a YAML list of points: `- {train.lr: 0.1, seed: 3}`, or with sections; `name` names the run."""
    from ddp_hpc.run.config.yaml_text import read_yaml  # late: few sweeps have a file

    try:
        content = read_yaml(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"The file of points {str(path)!r} cannot be read: {error.strerror}.") from error
    if not isinstance(content, list) or not content or not all(isinstance(each, dict) and each for each in content):
        raise ConfigError(
            f"The file of points {str(path)!r} must be a list with at least one point, each with keys and values, such as "
            "`- {train.lr: 0.1, seed: 3}`."
        )
    return [_flattened(each, f"{path}, point {number}") for number, each in enumerate(content)]


def _flattened(mapping: Mapping[Any, Any], location: str, section: str = "") -> dict[str, Any]:
    """Return the settings of a point with whole keys, `train.lr` for `train: {lr: ...}`."""
    leaves: dict[str, Any] = {}
    for name, value in mapping.items():
        key = f"{section}{name}"
        more = _flattened(value, location, f"{key}.") if is_section(key) and isinstance(value, dict) else {key: value}
        twice = leaves.keys() & more.keys()
        if twice:
            raise ConfigError(f"`{twice.pop()}` is set twice ({location}). Remove one.")
        leaves |= more
    return leaves
