"""Streams of workers: read, folded, held back, shown and kept in files."""
