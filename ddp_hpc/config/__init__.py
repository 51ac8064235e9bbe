"""From YAML, environment and command line to one frozen spec, every value with where it came from."""

from ddp_hpc.config.resolve import Change, Resolved, changes, flat, load_resolved, render_resolved, resolve, resolve_key

__all__ = ["Change", "Resolved", "changes", "flat", "load_resolved", "render_resolved", "resolve", "resolve_key"]
