"""Site profiles: what holds for all runs on one cluster, found by its name or by the host one is on."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_type_hints

from ddp_hpc.config.keys import Key, nearest
from ddp_hpc.config.paths import fill
from ddp_hpc.config.sources import Origin, Setting, read_mapping, settings_in
from ddp_hpc.config.values import convert
from ddp_hpc.errors import ConfigError
from ddp_hpc.run_dir import is_folder, settings_dirs

PROFILE_VARIABLE = "DDP_HPC_SITE_PROFILE"
"""Names a profile, or its file; empty: none."""
_FOLDER, _GENERAL = "sites", "site.yaml"
"""In a directory of settings: the profiles of sites, and the one for all hosts."""
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class Site:
    """What a profile says of the site itself; the fields are the keys of its section `site`."""

    name: str = ""
    """Unset: the file's name."""
    about: str = ""
    """One line for whoever looks at it."""
    hosts: tuple[str, ...] = ()
    """Names of hosts that the profile is for, `*` and `?` allowed; with a dot, whole domain names are compared."""
    scratch: str | None = None
    """Where large files belong."""
    no_write: tuple[str, ...] = ()
    """Directories that runs must not write to: homes with small quotas, read-only software."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A site's defaults for runs."""

    path: Path
    why: str
    """Why this one is used."""
    site: Site
    settings: tuple[Setting, ...]
    """For every run."""
    partitions: Mapping[str, tuple[Setting, ...]]
    """For runs in one partition."""


# --- which one ---------------------------------------------------------------------------------------------------------


def examples_dir() -> Path:
    """Return where the profiles are that come with us: beside the package in a checkout, in it once installed."""
    package = Path(__file__).parents[1]
    installed = package / "sites"
    return installed if installed.exists() else package.parent / "envs" / "sites"


def profile_dirs(environment: Mapping[str, str]) -> list[Path]:
    """Return where profiles are looked for by host: the user's own, then the machine's."""
    return [folder / _FOLDER for folder in settings_dirs(environment)]


def find_profile(
    environment: Mapping[str, str],
    named: str | None = None,
    *,
    fill: bool = True,
    host: Callable[[], str] = socket.gethostname,
) -> Profile | None:
    """Return the profile that is named, or is for this host, or is for all hosts; None where there is none.

    Without `fill`, variables in its paths stay as they are written.

    Raises:
        ConfigError: where the one that is named does not exist, several are for this host, or it cannot be read.
    """
    found = _find(environment, named, host)
    return None if found is None else read_profile(*found, environment if fill else None)


def _find(environment: Mapping[str, str], named: str | None, host: Callable[[], str]) -> tuple[Path, str] | None:
    """Return a profile's file, and why it is the one."""
    if named is not None:
        return _named(named, "it was named", environment)
    if PROFILE_VARIABLE in environment:
        asked = environment[PROFILE_VARIABLE]
        return _named(asked, f"{PROFILE_VARIABLE} names it", environment) if asked else None
    for folder in profile_dirs(environment):
        if fitting := [(one, pattern) for one in _profiles_in(folder) if (pattern := _pattern_for(one, host()))]:
            if len(fitting) > 1:
                several = " and ".join(f"{one.name} ({pattern!r})" for one, pattern in fitting)
                raise ConfigError(
                    f"Several site profiles in {folder} are for this host, {host()}: {several}. "
                    f"Make their `site.hosts` differ, or name one in {PROFILE_VARIABLE}."
                )
            path, pattern = fitting[0]
            return path, f"this host, {host()}, is {pattern!r}"
    general = (folder / _GENERAL for folder in settings_dirs(environment) if is_folder(folder))
    path_of_all = next((path for path in general if path.is_file()), None)
    return None if path_of_all is None else (path_of_all, "it is for all hosts")


def known_profiles(environment: Mapping[str, str]) -> dict[str, Path]:
    """Return the profiles that can be named, by name: the user's own before the machine's before the examples."""
    folders = [*profile_dirs(environment), examples_dir()]
    return {path.stem: path for folder in reversed(folders) for path in _profiles_in(folder)}


def _named(name: str, why: str, environment: Mapping[str, str]) -> tuple[Path, str]:
    if "/" in name or name.endswith((".yaml", ".yml")):
        path = Path(name).expanduser()
        if not path.is_file():
            raise ConfigError(f"The site profile {name!r} does not exist ({why}). Correct it, or leave it out.")
        return path, why
    known = known_profiles(environment)
    if name not in known:
        raise ConfigError(
            f"There is no site profile {name!r} ({why}). Known: {', '.join(sorted(known))}. `ddp-hpc site init` makes one."
        )
    return known[name], why


def _profiles_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.yaml")) if is_folder(folder) else []


def _pattern_for(path: Path, host: str) -> str | None:
    """Return the pattern of a profile that is this host's name, if any."""
    section = read_mapping(path).get("site") or {}
    patterns = section.get("hosts") or [] if isinstance(section, dict) else []
    return (
        next((str(one) for one in patterns if _is_host(str(one), host)), None) if isinstance(patterns, list) else None
    )


def _is_host(pattern: str, host: str) -> bool:
    if "." in pattern:
        return fnmatchcase(host if "." in host else socket.getfqdn(host), pattern)
    return fnmatchcase(host.partition(".")[0], pattern)


# --- what it says ------------------------------------------------------------------------------------------------------


def read_profile(path: Path, why: str, environment: Mapping[str, str] | None) -> Profile:
    """Read one profile: keys as in any configuration, and the sections `site` and `partitions`.

    Raises:
        ConfigError: where it cannot be read, or a value cannot be.

    Without `environment`, variables in its paths stay as they are written.
    """
    content = read_mapping(path)
    lines = getattr(content, "lines", {})
    about = content.pop("site", None) or {}
    partitions = content.pop("partitions", None) or {}
    for name, section in {"site": about, "partitions": partitions}.items():
        if not isinstance(section, dict):
            raise ConfigError(f"`{name}` is {section!r} ({path}, line {lines[name]}), but it is a section.")
    source = f"site profile {path}"
    return Profile(
        path=path,
        why=why,
        site=_site(path, about, environment),
        settings=_expanded(settings_in(content, Origin(source, str(path))), environment),
        partitions={
            str(name): _partition(str(name), section, Origin(f"{source}, partition {name}", str(path)), environment)
            for name, section in partitions.items()
        },
    )


def _partition(name: str, section: Any, origin: Origin, environment: Mapping[str, str] | None) -> tuple[Setting, ...]:
    if not isinstance(section, dict):
        if section is None:
            return ()
        raise ConfigError(f"`partitions.{name}` is {section!r} ({origin}), but it holds keys, such as `resources`.")
    settings = _expanded(settings_in(section, origin), environment)
    if any(setting.key == "slurm.partition" for setting in settings):
        raise ConfigError(f"`partitions.{name}` sets `slurm.partition` ({origin}), by which it is chosen. Remove it.")
    return settings


def _site(path: Path, section: Mapping[str, Any], environment: Mapping[str, str] | None) -> Site:
    annotations = get_type_hints(Site)
    lines = getattr(section, "lines", {})
    values: dict[str, Any] = {}
    for name, value in section.items():
        place = Origin("", str(path), lines.get(name))
        if name not in annotations:
            near = nearest(str(name), annotations)
            hint = f" Did you mean `site.{near}`?" if near else ""
            told = ", ".join(field.name for field in fields(Site))
            raise ConfigError(f"`site.{name}` ({place}) is no key.{hint} Keys of `site`: {told}.")
        given = Setting(f"site.{name}", value, place)
        values[name] = convert(Key(given.key, annotations[name], MISSING), _fill(given, environment).value, str(place))
    site = Site(**{"name": path.stem, **values})
    if not PLAIN_NAME.fullmatch(site.name):
        raise ConfigError(
            f"`site.name` is {site.name!r} ({path}), but a name is made of letters, digits, `.`, `_`, `-`."
        )
    return site


def _expanded(settings: Sequence[Setting], environment: Mapping[str, str] | None) -> tuple[Setting, ...]:
    return tuple(_fill(setting, environment) for setting in settings)


def _fill(setting: Setting, environment: Mapping[str, str] | None) -> Setting:
    return setting if environment is None else fill(setting, environment)


def refuse_unwelcome(path: Path, profile: Profile | None) -> None:
    """Refuse a run's directory where the site wants none.

    Raises:
        ConfigError: where it lies in one of `site.no_write`.
    """
    if profile is None:
        return
    for place in profile.site.no_write:
        if path.resolve().is_relative_to(Path(place).expanduser().resolve()):
            instead = f": `runs_dir={profile.site.scratch}/runs`" if profile.site.scratch else " with `runs_dir=...`"
            raise ConfigError(
                f"The run's directory would be {path}, but the site profile {profile.site.name} ({profile.path}) wants no "
                f"runs in {place}. Choose another place{instead}."
            )
