"""Tests of single rooms, without processes."""
