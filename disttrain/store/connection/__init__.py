"""A client's way to the server."""
