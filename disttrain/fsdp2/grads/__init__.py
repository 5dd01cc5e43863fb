"""Gradients, from autograd's to those of the shards."""
