"""Tells attention, however deep in a model it is called, over which mesh axis positions are cut, and how.

This file loads nothing of what computes: every call of attention looks here.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import ref

from disttrain.process_group._torch import outside_graphs
from disttrain.process_group.current import current_world

if TYPE_CHECKING:
    from disttrain.kernels.attention.context.parts import Parts
    from disttrain.kernels.attention.rules import Mask
    from disttrain.mesh import DeviceMesh


between_graphs: Final = partial(
    outside_graphs,
    reason="attention of positions that are cut exchanges keys between graphs. Give fullgraph=False, to compile_blocks "
    "or torch.compile",
)
"""Marks functions that exchange keys, for Dynamo."""


class Cut(NamedTuple):
    """A mesh of one axis, and which positions each of its ranks has."""

    parts: Parts
    axis: DeviceMesh
    way: str | None
    within: Mask | None = None
    """The most that calls without a rule of ours see, such as their own document."""


ENTERED: Final[list[Cut]] = []
"""Of the process, not of a thread: a backward, which computes anew what was not kept, runs on another one."""


@contextmanager
def using(parts: Parts, axis: DeviceMesh, way: str | None = None, within: Mask | None = None) -> Iterator[None]:
    """Has attention within the block, and within backwards that run there, take its positions as cut by `parts` over
    `axis`."""
    cut = Cut(parts, axis, way, within)
    ENTERED.append(cut)
    try:
        yield
    finally:
        # Ranks that are threads enter and leave in any order.
        index = next(index for index in reversed(range(len(ENTERED))) if ENTERED[index] is cut)
        del ENTERED[index]


@between_graphs
def current_cut() -> Cut | None:
    """The cut of the innermost block that this rank is in."""
    if not ENTERED:
        return None
    # Ranks that are threads have each a world, and enter blocks of their own.
    world = current_world("attention")
    return next((cut for cut in reversed(ENTERED) if cut.axis.get_group().world is world), None)


def given_or_current(
    axis: DeviceMesh | None, parts: Parts | None, way: str | None
) -> tuple[DeviceMesh | None, Parts | None, str | None]:
    """Completes what a call is given: the rest is that of the block, if that is of the same axis."""
    cut = current_cut() if ENTERED else None
    if cut is None or (axis is not None and axis != cut.axis):
        return axis, parts, way
    return cut.axis, parts or cut.parts, way or cut.way


def state_of_block() -> Hashable:
    """Equal to another as long as attention looks across ranks in the same way; it keeps no tensors alive."""
    cut = current_cut()
    if cut is None:
        return None
    return cut.parts, cut.axis, cut.way, None if cut.within is None else ref(cut.within)
