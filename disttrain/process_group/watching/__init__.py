"""Observers of collectives, and reports of calls that don't fit."""
