"""Tells the other ranks of an error that only one rank finds in its model, or raises within it, so that they do not
wait for its collectives.

A rank whose modules have been changed, or whose batch is bad, raises before it gathers or reduces what the others do.
The others are told as for a refused collective (docs/decisions/010-refusals-are-told.md). If all ranks raise, none
waits and nothing happens. None of this runs without an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from disttrain.errors import DisttrainError
from disttrain.process_group.watching.refusals import ANY

if TYPE_CHECKING:
    from disttrain.fsdp2.params.sharding import Sharding
    from disttrain.process_group import ProcessGroup


class OnRanks(Protocol):
    """Parameters that ranks gather and reduce together."""

    @property
    def sharding(self) -> Sharding: ...

    @property
    def reduced_apart(self) -> ProcessGroup | None: ...


def tell_of(operation: str, error: Exception, groups: Sequence[OnRanks]) -> None:
    """This rank is about to raise `error`: nobody must wait for it to gather or reduce these groups, or others on their
    meshes. If it has raised an earlier error instead of the same collective, the others are told that one."""
    meshes = {group.sharding.mesh for group in groups}
    apart = {group.reduced_apart for group in groups if group.reduced_apart is not None}
    axes = [mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim) if mesh.shape[axis] > 1]
    try:
        # Other ranks may be waiting in any of them.
        for each in dict.fromkeys([*axes, *apart]):
            if not each.ended_by and not each.num_refused.get(each.sequence + 1):
                each.refuse(operation, error, ANY)
    except DisttrainError as reason:
        error.add_note(f"The other ranks could not be told: {reason}")
