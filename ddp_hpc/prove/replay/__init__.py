"""Computes steps of a run again, and says where two computations part."""
