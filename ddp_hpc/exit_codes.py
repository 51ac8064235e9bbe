"""What our processes mean by their exit codes."""

FINISHED = 0
"""All steps are done and committed."""
FAILED = 1
"""Something broke."""
REFUSED = 2
"""The user asked for something that cannot be; the same again will fail the same way."""
STOPPED = 99
"""A checkpoint is committed and there is more to do: start again (the code that batch systems use for it)."""
UNHEARD = 96
"""Told to stop before anybody could listen; nothing was begun."""
FENCED = 97
"""Another attempt owns the run now; this one has written nothing more."""
PORT_TAKEN = 98
"""Somebody else listens where the ranks were to meet: start again with another port."""
