"""The configuration of each point of a sweep."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.launch.sweep.points import Point, as_text, settings_as_key
from ddp_hpc.run.config.fill_paths import escape_dollars
from ddp_hpc.run.config.keys import is_section, key_of, unknown_key_error
from ddp_hpc.run.config.overlay import Overlay
from ddp_hpc.run.config.resolve import Resolved
from ddp_hpc.run.spec import RunSpec
from ddp_hpc.run.spec.launch import RUN_NAME_PATTERN

POINT_PLACEHOLDER = "point"
"""The word in braces that stands for the point's name in a script's command."""
_PLACEHOLDER_PATTERN = re.compile(r"(?<!\$)\{([A-Za-z_][A-Za-z0-9_.-]*)\}")
"""A word in braces: `lr` in `--lr={lr}`. `${word}` belongs to a shell, or to Hydra."""
_SHARED_KEYS = ("slurm", "resources", "container", "stage", "snapshot", "site", "launcher", "runs_dir", "script.start")
"""Sections and keys that the tasks of a job array share, as they have one script and one kind of allocation."""
_NUM_WORKERS_KEY = "data.num_workers"
"""They share this one as well, where it says how many CPUs a worker gets."""
_NEVER_SWEPT_KEYS = ("runs_dir", "resources.nodes")
"""On one machine, too: it has one directory for the sweep, and one node."""
_USERS_KEYS = ("recipe.", "script.", "optimizer.name", "train.init_from")
_MOST_CHECKED = 32
"""Each costs some milliseconds of the submission."""


class PointResolver:
    """Makes the configuration of one point after another."""

    def __init__(self, base: Resolved, environ: Mapping[str, str]) -> None:
        """`base` is the sweep's own configuration: its name, and the directory of runs in which the sweep's directory lies."""
        self._overlay = Overlay(base, environ)
        self._command = base.spec.script.command
        self._runs_dir = escape_dollars(base.spec.path)

    def resolve(self, point: Point) -> Resolved:
        settings: dict[str, Any] = {key: value for key, value in point.settings.items() if _is_key(key)}
        settings |= {"name": point.name, "runs_dir": self._runs_dir}
        if self._command and "script.command" not in settings:
            words = {**{key: as_text(value) for key, value in point.settings.items()}, POINT_PLACEHOLDER: point.name}
            settings["script.command"] = [
                _PLACEHOLDER_PATTERN.sub(lambda match: words.get(match[1], match[0]), word) for word in self._command
            ]
        try:
            return self._overlay.resolve(settings, f"sweep, {point}")
        except ConfigError as error:
            raise type(error)(f"The sweep's {point} is not a valid configuration: {error}") from error


def _is_key(key: str) -> bool:
    return key_of(key) is not None or is_section(key)


def check_points(base: Resolved, points: Sequence[Point], environ: Mapping[str, str], *, is_array: bool) -> None:
    """Resolve each point, and make nothing.

    `is_array`: the points are to be tasks of one job array.
    """
    in_braces = {name for word in base.spec.script.command for name in _PLACEHOLDER_PATTERN.findall(word)}
    of_cpus = () if base.spec.resources.cpus_per_worker else (_NUM_WORKERS_KEY,)
    shared = (*_SHARED_KEYS, *of_cpus) if is_array else _NEVER_SWEPT_KEYS
    is_plain = "{" not in "".join(base.spec.script.command[:1])
    made = PointResolver(base, environ)
    checked: set[str] = set()
    keys: set[str] = set()
    """Those that the points set, without the words of a script's command."""
    resolved: set[tuple[tuple[str, str], ...]] = set()
    for point in points:
        for key in _check_keys(point, checked, in_braces, shared):
            checked.add(key)
            keys |= {key} if _is_key(key) else set()
        # To resolve 1,000 points takes as long as all the rest of a submission, and many differ in a script's words alone.
        settings = settings_as_key({key: value for key, value in point.settings.items() if key in keys})
        are_plain = is_plain and not any("\0" in as_text(one) for one in point.settings.values())
        if settings not in resolved or not are_plain or RUN_NAME_PATTERN.fullmatch(point.name) is None:
            made.resolve(point)
        resolved.add(settings)


def specs_to_check(base: Resolved, points: Sequence[Point], environ: Mapping[str, str]) -> list[RunSpec]:
    """Return the first point's spec, and those of some points that differ from it in what is checked of the user's part."""
    in_braces = {name for word in base.spec.script.command for name in _PLACEHOLDER_PATTERN.findall(word)}
    made, different = PointResolver(base, environ), dict[Any, Point]()
    for point in points:
        own = {key: value for key, value in point.settings.items() if key.startswith(_USERS_KEYS) or key in in_braces}
        different.setdefault(settings_as_key(own), point)
    return [made.resolve(point).spec for point in [*different.values()][:_MOST_CHECKED]]


def _check_keys(point: Point, seen: set[str], in_braces: set[str], shared: Sequence[str]) -> Iterator[str]:
    """Yield the keys that were checked; each is checked once. `shared` are those that are the same for all points."""
    for key in point.settings.keys() - seen:
        if key == POINT_PLACEHOLDER:
            raise ConfigError(
                f"`{POINT_PLACEHOLDER}` cannot be swept: {{{POINT_PLACEHOLDER}}} stands for the point's name. Name the key otherwise."
            )
        if not _is_key(key) and key not in in_braces:
            hint = f"or write {{{key}}} in the script's command, after `--`, where its value belongs"
            raise ConfigError(f"{unknown_key_error(key, f'the sweep, {point}')} Correct it, {hint}.")
        if of_all := next((one for one in shared if key == one or key.startswith(f"{one}.")), None):
            fixed = " Or set `resources.cpus_per_worker`." if key == _NUM_WORKERS_KEY else ""
            raise ConfigError(
                f"`{key}` cannot be swept: on Slurm, the points of a sweep are tasks of one job array with one script, so `{of_all}` is "
                f"the same for all of them. Submit a sweep for each value of `{key}`.{fixed}"
            )
        yield key
