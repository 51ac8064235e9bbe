"""From YAML, environment and command line to one frozen spec, every value with where it came from."""

from ddp_hpc.config.resolve import (
    HIDDEN,
    Change,
    Resolved,
    changes,
    flat,
    load_resolved,
    render_resolved,
    resolve,
    resolve_key,
)

__all__ = [
    "HIDDEN",
    "Change",
    "Resolved",
    "changes",
    "flat",
    "load_resolved",
    "render_resolved",
    "resolve",
    "resolve_key",
]
