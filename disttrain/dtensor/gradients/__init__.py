"""Gradients and optimizers' steps."""
