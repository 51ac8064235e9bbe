"""What is tried now and then, by `make campaign-...`, and written down in docs/results."""
