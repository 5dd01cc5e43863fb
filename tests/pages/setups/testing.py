"""What the code of docs/testing.md takes for granted: one process."""

NUM_RANKS = 1
