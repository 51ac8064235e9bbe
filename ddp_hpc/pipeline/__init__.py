"""Pipelines: a few runs in one file, each of which starts when others have ended."""
