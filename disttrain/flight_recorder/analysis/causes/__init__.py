"""Causes of a hang: missing ranks, other calls, other groups, a slow rank or device."""
