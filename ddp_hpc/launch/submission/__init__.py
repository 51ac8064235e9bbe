"""Submission from a login node: check a run, make its directory, and start it or send its job."""
