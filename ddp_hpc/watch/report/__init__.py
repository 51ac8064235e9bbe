"""Shows a run to people: one page, a trace, a live screen. Reads the run directory through `watch` and `run_dir`."""
