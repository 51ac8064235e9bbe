"""Anywhere, reading: run directories are read, nothing is changed."""
