"""Read YAML files, environment variables and the command line into one frozen spec, and keep each value's source."""

from ddp_hpc.run.config.overlay import Overlay
from ddp_hpc.run.config.resolve import (
    HIDDEN,
    Resolved,
    changes,
    dropped_from,
    flat,
    keys_of_source,
    load_resolved,
    render_resolved,
    resolve,
    resolve_key,
)

__all__ = [
    "HIDDEN",
    "Overlay",
    "Resolved",
    "changes",
    "dropped_from",
    "flat",
    "keys_of_source",
    "load_resolved",
    "render_resolved",
    "resolve",
    "resolve_key",
]
