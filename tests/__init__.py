"""Tests of ddp_hpc."""
