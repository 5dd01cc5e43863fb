"""Sums of what comes piece by piece: of gradients, and of attention by the sums of its weights."""
