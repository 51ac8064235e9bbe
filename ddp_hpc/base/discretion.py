"""Decide which values logs and displays may show, and which are hidden because they may be secrets."""

from __future__ import annotations

import re
from typing import Any

_HARMLESS = re.compile(
    r"(?:CUBLAS|CUDA|CUDNN|FI|GLOO|GOMP|HIP|HSA|KMP|LC|MASTER|MIOPEN|MKL|NCCL|NUMEXPR|OFI|OMP|OPENBLAS|PYTORCH|RCCL|RDMAV|ROCR"
    r"|TORCH|TORCHDYNAMO|TORCHINDUCTOR|UCX|XLA)_"
)
"""How variables begin that configure libraries and hold no secrets."""
_HARMLESS_NAMES = frozenset({"LANG", "LD_LIBRARY_PATH", "PATH", "PYTHONHASHSEED", "PYTHONPATH", "TMPDIR", "TZ"})
_SECRET = re.compile(
    r"(?:^|[_.-])(?:api_?key|key|tokens?|secrets?|pass|passwd|password|passphrase|credentials?|auth|cookie)$",
    re.IGNORECASE,
)
"""Names whose values are secrets, by their ending: `HF_TOKEN`, but not `num_tokens_seen` or `key_size`."""


def is_shown(variable: str) -> bool:
    """Tell whether logs and displays may show the value of an environment variable."""
    return bool(_HARMLESS.match(variable) or variable in _HARMLESS_NAMES) and not _SECRET.search(variable)


def is_key_shown(key: str, value: Any) -> bool:
    """Tell whether logs and displays may show the value of a configuration key; outside of `env`, only text can be a secret."""
    section, _, name = key.partition(".")
    if section == "env" and name:
        return value is None or is_shown(name)
    return not isinstance(value, str) or not value or not _SECRET.search(key)
