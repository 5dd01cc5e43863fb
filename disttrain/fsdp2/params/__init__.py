"""Parameters: their shards, what is gathered of them, and how they lie in buffers."""
