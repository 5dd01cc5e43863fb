"""What is seen of collectives, and what is said where they don't fit."""
