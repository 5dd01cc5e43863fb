"""Saving while training goes on, by a process of each rank's own."""
