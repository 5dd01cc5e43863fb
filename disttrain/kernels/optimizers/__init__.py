"""Optimizers whose step is one launch."""
