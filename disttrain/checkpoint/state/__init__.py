"""Takes a state apart into named leaves, and puts it together again."""
