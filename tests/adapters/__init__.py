"""Libraries with training loops of their own, by the examples that newcomers copy; `make test-adapters` runs them."""
