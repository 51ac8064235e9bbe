"""Drills: inject one fault into a short real run, and check whether the run survives it."""
