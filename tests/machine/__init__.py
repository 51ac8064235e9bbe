"""How busy machines are."""
