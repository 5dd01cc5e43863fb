"""Waits: which rank waits for which, on hosts and on devices."""
