"""What a run directory holds: its paths, ledger and records, who may write them, and how they are polled."""
