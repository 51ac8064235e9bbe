"""A user's own script as the workers run it: how it starts, what it gets, and what its end means. Free of torch."""
