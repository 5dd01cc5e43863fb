"""A whole training step as one CUDA graph: recorded once, then launched by one call."""
