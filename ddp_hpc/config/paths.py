"""Variables and `~` in the values that are paths: whoever submits fills them in, before anything is made of them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from string import Template

from ddp_hpc.config.sources import Setting
from ddp_hpc.errors import ConfigError

_PATHS = (
    "runs_dir",
    "container.image",
    "container.binds",
    "stage.archive",
    "train.init_from",
    "site.scratch",
    "site.no_write",
)
"""Values in which `$NAME` stands for a variable of whoever submits; elsewhere it is the job's to read."""
_OWN_HOME = re.compile(r"~(?=/|$)")


def filled(settings: Sequence[Setting], environment: Mapping[str, str]) -> list[Setting]:
    """Return the settings with paths filled in; of several for one key, only the last counts and is filled in."""
    last = {setting.key: setting for setting in settings}
    return [fill(setting, environment) if setting is last[setting.key] else setting for setting in settings]


def fill(setting: Setting, environment: Mapping[str, str]) -> Setting:
    """Return a path with the variables and the `~` in it filled in; anything else as it is.

    Raises:
        ConfigError: where a variable is not set, or a `$` names none.
    """
    if setting.key not in _PATHS or not isinstance(setting.value, (str, list)):
        return setting
    is_text = isinstance(setting.value, str)
    texts = [setting.value] if is_text else setting.value
    full = [_fill_text(text, setting, environment) if isinstance(text, str) else text for text in texts]
    return Setting(setting.key, full[0] if is_text else full, setting.origin)


def literal(path: object) -> str:
    """Return the text of a path in which nothing is to be filled in."""
    return str(path).replace("$", "$$")


def _fill_text(text: str, setting: Setting, environment: Mapping[str, str]) -> str:
    try:
        full = Template(text).substitute(environment)
    except KeyError as error:
        raise ConfigError(
            f"`{setting.key}` is {text!r} ({setting.origin}), but the variable ${error.args[0]} is not set here. "
            "Set it, or correct the value."
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"`{setting.key}` is {text!r} ({setting.origin}), but a `$` names a variable; `$$` is a `$`."
        ) from error
    if "HOME" in environment:
        return _OWN_HOME.sub(lambda _: environment["HOME"], full, count=1) if full.startswith("~") else full
    return os.path.expanduser(full)  # noqa: PTH111  # it may be an address, which a Path would change
