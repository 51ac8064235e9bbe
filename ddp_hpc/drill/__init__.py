"""Drills: a fault, made on purpose in a short real run, and whether the run survived it."""
