"""Dump files, read and checked. Torch-free."""
