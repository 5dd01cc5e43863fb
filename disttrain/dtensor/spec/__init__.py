"""How a tensor lies: placements, layouts, sizes of parts."""
