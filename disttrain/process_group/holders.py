"""Things outside of a group that hold its transports, and let go of them before they end.

A CUDA graph that has NCCL's collectives in it keeps their communicator: destroying that would wait for the graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol
from weakref import WeakKeyDictionary, WeakSet

from disttrain.process_group.group import ProcessGroup


class Holder(Protocol):
    def release(self, reason: str) -> None:
        """Lets go of a group's transports, for good; `reason` is a whole sentence."""


_HOLDERS: Final[WeakKeyDictionary[ProcessGroup, WeakSet[Holder]]] = WeakKeyDictionary()


def hold(groups: Iterable[ProcessGroup], holder: Holder) -> None:
    """Has `holder` released before one of these groups ends. It is not kept alive."""
    for group in groups:
        _HOLDERS.setdefault(group, WeakSet()).add(holder)


def release_holders(group: ProcessGroup) -> None:
    """The group is about to end."""
    for holder in tuple(_HOLDERS.pop(group, ())):
        holder.release(f"group {group.group_name} has been destroyed.")
