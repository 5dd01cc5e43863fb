"""Decides which rank has which positions, who sends which keys, and in which steps. Pure."""
