"""How a model becomes stages, and how a stage's backward is split."""
