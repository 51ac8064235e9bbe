"""Where the ranks of a job meet: interfaces, address, port, and every variable that follows, each with its reason."""
