"""Groups of one host that take themselves for ones of several."""

from __future__ import annotations

from disttrain import ProcessGroup
from disttrain.process_group import current_world


def set_spans_hosts(within: tuple[ProcessGroup, ...] = (), between: tuple[ProcessGroup, ...] = ()) -> None:
    """Say of groups whether they are within a host or between hosts. Every rank of the world calls it.

    All have said it before any group connects, which may be beside what a rank does: it would find out the truth.
    """
    for group in (*within, *between):
        group.spans_hosts = group in between
    world = current_world()
    world.store.barrier("spans_hosts", world.world_size)
