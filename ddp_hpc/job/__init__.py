"""The batch host and the nodes: what starts workers, watches them, and writes the ledger; free of torch."""
