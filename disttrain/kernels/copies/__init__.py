"""Copies of many tensors in one launch."""
