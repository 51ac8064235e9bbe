"""What a run directory holds: its paths, ledger and records, who may write them, and how they are polled.

A function that reads or writes raises the OSError of a file system that does not answer, unless it says what it returns then;
one that waits (`await_answer`) raises UnreadableError.
"""
