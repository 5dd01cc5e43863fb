"""What the code of docs/mesh.md takes for granted: four ranks."""

NUM_RANKS = 4
