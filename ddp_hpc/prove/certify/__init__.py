"""Proof that a user's script comes back: run it undisturbed and under faults, compare the ends, and name what is wrong."""
