"""Read YAML files, environment variables and the command line into one frozen spec, and keep each value's source."""

from ddp_hpc.config.overlay import Overlay
from ddp_hpc.config.resolve import (
    HIDDEN,
    KEPT,
    Change,
    Resolved,
    changes,
    flat,
    load_resolved,
    render_resolved,
    resolve,
    resolve_key,
    with_kept,
)

__all__ = [
    "HIDDEN",
    "KEPT",
    "Change",
    "Overlay",
    "Resolved",
    "changes",
    "flat",
    "load_resolved",
    "render_resolved",
    "resolve",
    "resolve_key",
    "with_kept",
]
