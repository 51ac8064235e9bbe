"""Which nodes of a job reach each other on the network that the workers use."""
