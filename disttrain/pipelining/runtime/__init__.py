"""A schedule on real ranks: agreement, messages, computation."""
