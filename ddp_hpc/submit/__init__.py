"""The login node, sending."""
