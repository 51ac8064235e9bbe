"""Tests of the command line, as a user types it."""
