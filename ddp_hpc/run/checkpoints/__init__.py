"""Checkpoints on disk: their names, the layout of their files, and how they are committed, verified and pruned."""
