"""Tests against a real Slurm of several nodes, which `lab` boots on this machine."""
