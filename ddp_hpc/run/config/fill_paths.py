"""Replace variables and `~` in path values, with the environment of the user who submits."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from string import Template

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.run.config.sources import Setting

_PATH_KEYS = (
    "runs_dir",
    "container.image",
    "container.binds",
    "script.progress",
    "stage.archive",
    "train.init_from",
    "site.scratch",
    "site.no_write",
)
"""Keys in whose values `$NAME` is a variable of the user who submits. In other values, `$NAME` stays as it is, for the job."""
_OWN_HOME_PATTERN = re.compile(r"~(?=/|$)")


def fill_settings(settings: Sequence[Setting], environ: Mapping[str, str]) -> list[Setting]:
    """Return the settings with their paths filled in. Of several settings for one key only the last counts and is filled in."""
    last = {setting.key: setting for setting in settings}
    return [fill_one(setting, environ) if setting is last[setting.key] else setting for setting in settings]


def fill_one(setting: Setting, environ: Mapping[str, str]) -> Setting:
    """Return a path setting with its variables and `~` replaced; other settings unchanged."""
    if setting.key not in _PATH_KEYS or not isinstance(setting.value, (str, list)):
        return setting
    is_text = isinstance(setting.value, str)
    texts = [setting.value] if is_text else setting.value
    full = [_fill_text(text, setting, environ) if isinstance(text, str) else text for text in texts]
    return Setting(setting.key, full[0] if is_text else full, setting.origin)


def escape_dollars(path: object) -> str:
    """Return a path's text with `$` doubled, so that `fill_one` returns it unchanged."""
    return str(path).replace("$", "$$")


def refuse_unknown_home(path: str, what: str) -> None:
    """Refuse a path in the home of a user whom this host does not know; `what` says where it stands, in an error."""
    if path.startswith("~") and os.path.expanduser(path).startswith("~"):  # noqa: PTH111  a Path raises an error for it
        raise ConfigError(f"{what}, but this host has no user {path.partition('/')[0][1:]!r}. Correct the path.")


def _fill_text(text: str, setting: Setting, environ: Mapping[str, str]) -> str:
    try:
        full = Template(text).substitute(environ)
    except KeyError as error:
        raise ConfigError(
            f"`{setting.key}` is {text!r} ({setting.origin}), but the environment variable {error.args[0]} is not set. Set it, or correct the value."
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"`{setting.key}` is {text!r} ({setting.origin}), but a `$` must be followed by a variable's name. Write `$$` for a plain `$`."
        ) from error
    refuse_unknown_home(full, f"`{setting.key}` is {text!r} ({setting.origin})")
    if "HOME" in environ:
        return _OWN_HOME_PATTERN.sub(lambda _: environ["HOME"], full, count=1) if full.startswith("~") else full
    return os.path.expanduser(full)  # noqa: PTH111  # it may be an image's address, which a Path would change
