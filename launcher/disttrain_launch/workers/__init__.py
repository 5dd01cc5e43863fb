"""A node's workers: started, watched, stopped."""
