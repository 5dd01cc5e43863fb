"""The store's protocol, without I/O."""
