"""Placements, layouts, specs, and the sizes of parts."""
