"""Where saves lie, and how files are read, written, locked and replaced."""
