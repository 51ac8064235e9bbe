"""The training worker, one process per GPU; no other package imports torch."""
