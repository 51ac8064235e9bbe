"""Many specs that differ in a few keys, each made in a fraction of the time that a whole configuration takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.run.config.fill_paths import fill_settings
from ddp_hpc.run.config.keys import all_keys, convert_value, key_of
from ddp_hpc.run.config.resolve import Resolved, flat_spec, unflatten
from ddp_hpc.run.config.sources import Origin, settings_in


class Overlay:
    """A resolved configuration, and what each of many runs sets on top of it."""

    def __init__(self, base: Resolved, environ: Mapping[str, str]) -> None:
        self._base = base
        self._environ = environ
        self._values = flat_spec(base.spec)
        self._sections: dict[tuple[str, ...], Any] = {}
        """The sections that were made, by what is set in them: most points share most of them."""

    def resolve(self, settings: Mapping[str, Any], source: str, *, are_filled: bool = False) -> Resolved:
        """Return the configuration with these settings, which come from `source`; `are_filled`: a `$` in a path is one."""
        given = settings_in(settings, Origin(source, source))
        given = given if are_filled else fill_settings(given, self._environ)
        values, sources = dict(self._values), dict(self._base.sources)
        for setting in given:
            key = key_of(setting.key)
            assert key is not None  # noqa: S101  # `settings_in` yields known keys only
            for old in [] if setting.key in all_keys() and not key.is_open else list(values):
                if old.startswith(f"{setting.key}.") or setting.key.startswith(f"{old}."):
                    values.pop(old)
                    sources.pop(old, None)
            values[setting.key] = convert_value(key, setting.value, source)
            sources[setting.key] = source
        try:
            parts = [setting.key.split(".") for setting in given]
            changed = {".".join(some[: depth + 1]) for some in parts for depth in range(len(some))}
            spec = self._with_changes(self._base.spec, "", values, changed)
        except ConfigError as error:
            raise type(error)(f"{error} (From {source}.)") from error
        return Resolved(spec, sources, self._base.profile)

    def _with_changes(self, section: Any, prefix: str, values: Mapping[str, Any], changed: set[str]) -> Any:
        """Return a section of the spec with the keys and sections of `changed`; parts without one stay the objects that they are."""
        made: dict[str, Any] = {}
        for field in fields(section):
            name = prefix + field.name
            if name not in changed:
                continue
            part = getattr(section, field.name)
            if is_dataclass(part):
                below = sorted(key for key in changed if key.startswith(f"{name}."))
                known = (name, *(f"{key}={values.get(key)!r}" for key in below))
                if known not in self._sections:
                    self._sections[known] = self._with_changes(part, f"{name}.", values, changed)
                made[field.name] = self._sections[known]
            else:
                made[field.name] = values[name] if name in values else unflatten(name, values)
        return replace(section, **made)
