"""The training state: what it is, how it is saved and restored."""
