"""Gradients, from those that autograd computes to those of the shards."""
