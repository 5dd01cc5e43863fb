"""Parameters: their shards, the gathered parameters, and their layout in buffers."""
