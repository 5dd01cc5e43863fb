"""A server's place on each node: it passes on what the node's ranks ask, over one connection."""
