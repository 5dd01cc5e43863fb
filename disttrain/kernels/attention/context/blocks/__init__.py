"""Attention over some keys, by one kernel or another, and its join with attention over others."""
