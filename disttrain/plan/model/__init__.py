"""The model, its parts and what they take."""
