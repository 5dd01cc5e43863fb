"""Estimates what training a sharded model costs each rank, before it runs."""
