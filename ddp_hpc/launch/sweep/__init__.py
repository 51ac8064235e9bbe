"""Sweeps: many runs that differ in a few keys, submitted together."""
