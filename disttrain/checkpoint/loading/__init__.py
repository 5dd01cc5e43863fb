"""Loading: which bytes are needed, which rank reads them, and where they go."""
