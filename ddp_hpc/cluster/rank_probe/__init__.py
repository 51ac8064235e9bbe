"""Questions to a rank that runs: its stacks, its flight record, its wait counters, over a unix socket of its own."""
