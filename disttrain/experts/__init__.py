"""Mixtures of experts: routing, expert parallel, and models that have them."""
