"""One module for each verb: its arguments, and the code that runs it."""
