"""Views that cannot share memory with what they view."""
