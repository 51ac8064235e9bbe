"""Reads run directories, on any host, and changes nothing in them."""
