"""What a node was asked to run."""
