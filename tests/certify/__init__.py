"""Proof that scripts come back: planted defects are named, and good scripts pass."""
