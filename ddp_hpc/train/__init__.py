"""One process a GPU: the only wing that imports torch."""
