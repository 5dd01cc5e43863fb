"""What the code of docs/store.md takes for granted: one process."""

NUM_RANKS = 1
