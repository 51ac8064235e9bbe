"""Site profiles: defaults for all runs on one cluster, chosen by name or by this host's name."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.names import nearest
from ddp_hpc.base.processes import host_name
from ddp_hpc.run.config.fill_paths import fill_one
from ddp_hpc.run.config.keys import Key, convert_value
from ddp_hpc.run.config.removed import removed_key_error
from ddp_hpc.run.config.sources import Origin, Setting, read_mapping, settings_in
from ddp_hpc.run.run_dir.paths import is_folder, settings_dirs

PROFILE_VARIABLE = "DDP_HPC_SITE_PROFILE"
"""The environment variable that names a profile or its file; empty means no profile."""
_FOLDER, _GENERAL = "sites", "site.yaml"
"""In a settings directory: the subdirectory of site profiles, and the profile for all hosts."""
SITE_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class Site:
    """A profile's section `site`, which describes the site itself; the fields are its keys."""

    name: str = ""
    """The profile's name. Default: the file's name without its ending."""
    about: str = ""
    """One line that describes the site."""
    hosts: tuple[str, ...] = ()
    """Host names for which the profile is used, `*` and `?` allowed; a name with a dot is compared with the full domain name."""
    scratch: str | None = None
    """The directory for large files."""
    no_write: tuple[str, ...] = ()
    """Directories that runs must not write to: homes with small quotas, read-only software."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A site's defaults for runs, as read from a profile."""

    path: Path
    why: str
    """Why this profile is used."""
    site: Site
    settings: tuple[Setting, ...]
    """Settings for every run."""
    partitions: Mapping[str, tuple[Setting, ...]]
    """Partition -> more settings for runs there."""


# --- which one ---------------------------------------------------------------------------------------------------------


def examples_dir() -> Path:
    """Return the directory of the example profiles: beside the package in a checkout, inside it once installed."""
    package = Path(__file__).parents[2]
    installed = package / "sites"
    return installed if installed.exists() else package.parent / "envs" / "sites"


def profile_dirs(environ: Mapping[str, str]) -> list[Path]:
    """Return the directories that are searched for a host's profile: the user's, then the machine's."""
    return [folder / _FOLDER for folder in settings_dirs(environ)]


def find_profile(
    environ: Mapping[str, str], named: str | None = None, *, fill: bool = True, host: Callable[[], str] = host_name
) -> Profile | None:
    """Return the profile with this name, or else the one for this host, or else the one for all hosts; None without any.

    Without `fill`, variables in its paths stay as they are written.
    """
    found = _locate_profile(environ, named, host)
    return None if found is None else read_profile(*found, environ if fill else None)


def _locate_profile(environ: Mapping[str, str], named: str | None, host: Callable[[], str]) -> tuple[Path, str] | None:
    """Return a profile's file, and why it is used."""
    if named is not None:
        return _locate_by_name(named, "named on the command line", environ)
    if PROFILE_VARIABLE in environ:
        asked = environ[PROFILE_VARIABLE]
        return _locate_by_name(asked, f"{PROFILE_VARIABLE} names it", environ) if asked else None
    for folder in profile_dirs(environ):
        if fitting := [(path, pattern) for path in _profiles_in(folder) if (pattern := _fitting_pattern(path, host()))]:
            if len(fitting) > 1:
                several = " and ".join(f"{path.name} ({pattern!r})" for path, pattern in fitting)
                raise ConfigError(
                    f"Several site profiles in {folder} are for this host, {host()}: {several}. "
                    f"Make their `site.hosts` differ, or name one in {PROFILE_VARIABLE}."
                )
            path, pattern = fitting[0]
            return path, f"its `site.hosts` has {pattern!r}, which fits this host, {host()}"
    general = (folder / _GENERAL for folder in settings_dirs(environ) if is_folder(folder))
    path_of_all = next((path for path in general if path.is_file()), None)
    return None if path_of_all is None else (path_of_all, "it is for all hosts")


def known_profiles(environ: Mapping[str, str]) -> dict[str, Path]:
    """Return all profiles by name; of equal names the user's wins, then the machine's, then the example."""
    folders = [*profile_dirs(environ), examples_dir()]
    return {path.stem: path for folder in reversed(folders) for path in _profiles_in(folder)}


def _locate_by_name(name: str, why: str, environ: Mapping[str, str]) -> tuple[Path, str]:
    if "/" in name or name.endswith((".yaml", ".yml")):
        path = Path(os.path.expanduser(name))  # noqa: PTH111  a Path raises an error for `~nobody`
        if not path.is_file():
            raise ConfigError(f"The site profile {name!r} does not exist ({why}). Correct its path.")
        return path, why
    known = known_profiles(environ)
    if name not in known:
        raise ConfigError(
            f"There is no site profile {name!r} ({why}). Name one of {', '.join(sorted(known))}, or make one with `ddp-hpc site init`."
        )
    return known[name], why


def _profiles_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.yaml")) if is_folder(folder) else []


def _fitting_pattern(path: Path, host: str) -> str | None:
    """Return the pattern in a profile's `site.hosts` that fits this host, or None."""
    section = read_mapping(path).get("site") or {}
    patterns = section.get("hosts") if isinstance(section, dict) else None
    for pattern in map(str, patterns if isinstance(patterns, list) else [patterns or ""]):
        name = host.partition(".")[0]
        if "." in pattern:  # a pattern for full names
            name = host if "." in host else socket.getfqdn(host)
        if fnmatchcase(name, pattern):
            return pattern
    return None


# --- what it says ------------------------------------------------------------------------------------------------------


def read_profile(path: Path, why: str, environ: Mapping[str, str] | None) -> Profile:
    """Read one profile: keys as in every configuration, and the sections `site` and `partitions`.

    Without `environ`, variables in its paths stay as they are written.
    """
    content = read_mapping(path)
    lines = getattr(content, "lines", {})
    about = content.pop("site", None) or {}
    partitions = content.pop("partitions", None) or {}
    for name, section in {"site": about, "partitions": partitions}.items():
        if not isinstance(section, dict):
            raise ConfigError(
                f"`{name}` is {section!r} ({path}, line {lines[name]}), but it must be a section: set the keys below it."
            )
    source, fills = f"site profile {path}", (lambda one: one) if environ is None else partial(fill_one, environ=environ)
    return Profile(
        path=path,
        why=why,
        site=_parse_site(path, about, fills),
        settings=tuple(map(fills, settings_in(content, Origin(source, str(path))))),
        partitions={
            str(name): _partition(str(name), section, Origin(f"{source}, partition {name}", str(path)), fills)
            for name, section in partitions.items()
        },
    )


def _partition(name: str, section: Any, origin: Origin, fills: Callable[[Setting], Setting]) -> tuple[Setting, ...]:
    if not isinstance(section, dict):
        if section is None:
            return ()
        raise ConfigError(
            f"`partitions.{name}` is {section!r} ({origin}), but it must be a section: set keys such as `resources` below it."
        )
    settings = tuple(map(fills, settings_in(section, origin)))
    if any(setting.key == "slurm.partition" for setting in settings):
        raise ConfigError(
            f"`partitions.{name}` sets `slurm.partition` ({origin}), but that key selects this section. Remove `slurm.partition` from it."
        )
    return settings


def _parse_site(path: Path, section: Mapping[str, Any], fills: Callable[[Setting], Setting]) -> Site:
    annotations = get_type_hints(Site)
    lines = getattr(section, "lines", {})
    values: dict[str, Any] = {}
    for name, value in section.items():
        origin = Origin("", str(path), lines.get(name))
        if name not in annotations:
            if gone := removed_key_error(f"site.{name}", str(origin)):
                raise gone
            near = nearest(str(name), annotations)
            hint = f" Did you mean `site.{near}`?" if near else ""
            valid = ", ".join(field.name for field in fields(Site))
            raise ConfigError(f"`site.{name}` ({origin}) is not a key.{hint} Keys of `site`: {valid}.")
        given = Setting(f"site.{name}", [value] if name == "hosts" and isinstance(value, str) else value, origin)
        values[name] = convert_value(Key(given.key, annotations[name], MISSING), fills(given).value, str(origin))
    site = Site(**{"name": path.stem, **values})
    if not SITE_NAME_PATTERN.fullmatch(site.name):
        raise ConfigError(
            f"`site.name` is {site.name!r} ({path}), but a name may have only letters, digits, `.`, `_` and `-`."
        )
    return site


def refuse_forbidden_dir(path: Path, profile: Profile | None) -> None:
    """Refuse a run's directory in one of the directories `site.no_write`."""
    if profile is None:
        return
    for refused in profile.site.no_write:
        if path.resolve().is_relative_to(Path(refused).expanduser().resolve()):
            instead = f": `runs_dir={profile.site.scratch}/runs`" if profile.site.scratch else " with `runs_dir=...`"
            raise ConfigError(
                f"The run's directory would be {path}, but the site profile {profile.site.name} ({profile.path}) forbids "
                f"runs in {refused} (`site.no_write`). Choose another directory{instead}."
            )
