"""A request to run a job on a node."""
