"""What `fully_shard` does in a step with the parameters that a rank holds."""
