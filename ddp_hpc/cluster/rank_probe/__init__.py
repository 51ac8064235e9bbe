"""Questions to a rank that runs: its stacks and its flight record, over a unix socket of its own."""
