"""Which rank the others wait for."""
