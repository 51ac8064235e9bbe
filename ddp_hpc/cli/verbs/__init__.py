"""One file a verb: its arguments, and what it calls."""
