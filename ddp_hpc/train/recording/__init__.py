"""What a worker writes of its run: log lines, metrics, progress."""
