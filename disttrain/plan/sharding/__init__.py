"""A step of `fully_shard` on the parameters that one rank holds."""
