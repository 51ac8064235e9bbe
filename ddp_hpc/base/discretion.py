"""Decide what logs and displays may show of values and texts: secrets are hidden or masked, control characters can be seen."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_HARMLESS_START = re.compile(
    r"(?:CUBLAS|CUDA|CUDNN|FI|GLOO|GOMP|HIP|HSA|KMP|LC|MASTER|MIOPEN|MKL|NCCL|NUMEXPR|OFI|OMP|OPENBLAS|PYTORCH|RCCL|RDMAV|ROCR"
    r"|TORCH|TORCHDYNAMO|TORCHINDUCTOR|UCX|XLA)_"
)
"""How variables begin that configure libraries and hold no secrets."""
_HARMLESS_NAMES = frozenset({"LANG", "LD_LIBRARY_PATH", "PATH", "PYTHONHASHSEED", "PYTHONPATH", "TMPDIR", "TZ"})
_WORDS_REGEX = r"api_?key|token|secret|password|passwd|passphrase|credentials?|auth|cookie"
_SECRET_NAME = re.compile(rf"(?:^|[_.-])(?:{_WORDS_REGEX}|key|pass)s?$", re.IGNORECASE)
"""Names of variables whose values are secrets, by their ending: `HF_TOKEN`, but not `num_tokens_seen` or `key_size`."""
_SECRET_KEY_PATTERN = re.compile(rf"(?:^|[_.-])(?:(?:{_WORDS_REGEX})s?|key|pass)$", re.IGNORECASE)
"""The same of configuration keys, but not `recipe.args.label_keys`."""


def is_env_shown(variable: str) -> bool:
    """Tell whether logs and displays may show the value of an environment variable."""
    return bool(_HARMLESS_START.match(variable) or variable in _HARMLESS_NAMES) and not _SECRET_NAME.search(variable)


def is_key_shown(key: str, value: Any) -> bool:
    """Tell whether logs and displays may show the value of a configuration key; outside of `env`, only text can be a secret."""
    section, _, name = key.partition(".")
    if section == "env" and name:
        return value is None or is_env_shown(name)
    return not isinstance(value, str) or not value or not _SECRET_KEY_PATTERN.search(key)


HIDDEN = "(not shown)"
"""Printed instead of a value that may be a secret."""


def value_or_hidden(key: str, value: Any) -> Any:
    """Return the value of a configuration key as logs and displays may show it."""
    return value if is_key_shown(key, value) else HIDDEN


MASK = "***"
_LEAST_SECRET_LENGTH = 6
"""Characters; a shorter value is not looked for, as it may be part of any word."""
_COLOUR_PATTERN = re.compile(r"\x1b\[[0-9;:]*m")
_CONTROL_CHARS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Control characters (C0 without tab and line feed, and C1), and characters that change the direction of text."""
_SECRET_PATTERNS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(?P<before>://[^\s/:@]*:)[^\s/@]+(?=@)",
        rf"(?P<before>(?:{_WORDS_REGEX})[\"']?\s*=\s*[\"']?)[^\s\"'&,;)]+",
        rf"(?P<before>[\"'][\w.-]*(?:{_WORDS_REGEX})[\"']\s*:\s*[\"'])[^\"']+",
        r"(?P<before>[?&](?:key|sig|signature|code)=|//hooks\.slack\.com/services/)[^\s\"'&]+",
        r"(?P<before>\b(?:bearer|basic)\s+)[\w.~+/=-]{8,}",
        r"(?P<before>\b)(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[a-z]-|AKIA)[\w-]{12,}",
    )
)
"""Passwords in addresses, values of names such as `token`, and tokens that are known by how they begin."""


def escape_controls(text: str) -> str:
    r"""Return text without colours, and with every other control character as `\x1b`."""
    return _CONTROL_CHARS.sub(lambda found: ascii(found[0])[1:-1], _COLOUR_PATTERN.sub("", text))


def secret_values(values: Mapping[str, Any], environ: Mapping[str, str]) -> list[str]:
    """Return values of a configuration, and of variables, that may be secrets; the longest first."""
    of_keys = {value for key, value in values.items() if isinstance(value, str) and not is_key_shown(key, value)}
    of_variables = {value for name, value in environ.items() if _SECRET_NAME.search(name) and not is_env_shown(name)}
    return sorted(
        (one for one in of_keys | of_variables if len(one) >= _LEAST_SECRET_LENGTH), key=lambda one: (-len(one), one)
    )


def mask_secrets(text: str, secrets: Iterable[str] = ()) -> str:
    """Return text without these values, and without what looks like a secret. A secret in other words is not found."""
    for one in secrets:
        text = text.replace(one, MASK)
    for pattern in _SECRET_PATTERNS:
        text = pattern.sub(rf"\g<before>{MASK}", text)
    return text


def mask_record(record: Any, secrets: Iterable[str]) -> Any:
    """Return a value of JSON with all its texts masked, but not its keys."""
    if isinstance(record, str):
        return mask_secrets(record, secrets)
    if isinstance(record, Mapping):
        return {key: mask_record(value, secrets) for key, value in record.items()}
    return [mask_record(one, secrets) for one in record] if isinstance(record, (list, tuple)) else record
