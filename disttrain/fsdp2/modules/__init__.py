"""Parameters, arguments and results of sharded modules."""
