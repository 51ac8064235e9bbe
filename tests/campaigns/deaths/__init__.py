"""Runs that end badly on purpose: the ways to end, the programs that end so, and what `ddp-hpc why` must say of each."""
