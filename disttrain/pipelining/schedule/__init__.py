"""A schedule as data: actions, their order, what they cost, and how it is played."""
