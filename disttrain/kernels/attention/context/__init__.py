"""Attention of sequences whose positions are cut over the ranks of a mesh axis (context parallel)."""
