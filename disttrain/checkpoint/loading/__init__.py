"""Loading: which bytes are wanted, who reads them, where they go."""
