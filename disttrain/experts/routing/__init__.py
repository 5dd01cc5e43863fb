"""Routing: which experts a token goes to and by which weights, what keeps their loads even, and what is told of it."""
