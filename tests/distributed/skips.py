"""What a test here needs of PyTorch."""

from __future__ import annotations

import pytest
from torch._C._distributed_c10d import _get_handler_names  # type: ignore[attr-defined]  # the stubs leave it out

has_record_of_gloo = pytest.mark.skipif(
    "fr_trace_json" not in _get_handler_names(), reason="this PyTorch keeps no record of gloo's collectives"
)
