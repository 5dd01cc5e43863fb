"""What training a sharded model will cost each rank, before it runs."""
