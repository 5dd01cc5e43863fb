"""Saving, collectively: agree, write, commit."""
