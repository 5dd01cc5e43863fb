"""Dumps: written when a rank waits or ends, read on any machine."""
