"""Attention by rules, served by whichever implementation is fastest for a shape."""
