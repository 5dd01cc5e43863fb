"""Lets all ranks take one rank's choice, where each measures for itself.

The first rank that has measured writes its choice down (docs/decisions/022-the-first-rank-decides.md). No rank waits
for another.
"""

from __future__ import annotations

from disttrain.process_group.current import current_world, has_world


def agreed(subject: str, choice: str) -> str:
    """The choice of the first rank that asked about this subject."""
    if not has_world():
        return choice
    world = current_world()
    if world.world_size == 1:
        return choice
    return world.store.compare_set(subject, b"", choice.encode()).decode()
