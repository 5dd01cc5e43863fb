"""Saves in the memory of nodes."""
