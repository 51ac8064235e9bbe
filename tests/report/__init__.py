"""Reports, traces and screens of runs."""
