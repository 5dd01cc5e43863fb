"""Plans which rank reads for which: bytes that several ranks need are read by one of them. Pure.

The plan is a function of what ranks need, so that each can make its own part by itself, as for a save.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from disttrain.checkpoint.format.box import Box
from disttrain.checkpoint.format.layout import Layout, runs_of
from disttrain.checkpoint.format.manifest import Manifest
from disttrain.checkpoint.format.parts import parts_of_cuts
from disttrain.checkpoint.layout import TensorSpec
from disttrain.checkpoint.loading.fetches import Fetch, plan_fetches
from disttrain.checkpoint.plan import plan_load

SHARED_BYTES = 4 << 20
"""The most bytes that go from one rank to others at once."""

Wants = Mapping[str, TensorSpec]
"""A rank's wishes of a save: the spec of each tensor, by name."""


@dataclass(frozen=True)
class SharedFetch:
    """A fetch that all `holders`, ascending, want; `reader` is the one of them that reads it."""

    fetch: Fetch
    holders: tuple[int, ...]
    reader: int


def shared_boxes(wants: Sequence[Wants], rank: int) -> dict[tuple[int, ...], dict[str, list[Box]]]:
    """Parts that `rank` and others want alike: by those ranks, ascending, then by name.

    `wants` of the ranks, of which many may be one object: each is looked at once.
    """
    ranks_of: dict[int, list[int]] = {}
    for other, wanted in enumerate(wants):
        ranks_of.setdefault(id(wanted), []).append(other)
    wanting: dict[tuple[int, ...], tuple[int, ...]] = {}
    shared: dict[tuple[int, ...], dict[str, list[Box]]] = {}
    places: dict[tuple[object, ...], tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for name, spec in wants[rank].items():
        if 0 in spec.shape or (not spec.is_plain and None not in spec.cuts):
            continue  # no two ranks have the same part
        alike = tuple(first for first, *_ in ranks_of.values() if wants[first].get(name) == spec)
        if alike not in wanting:
            wanting[alike] = tuple(sorted(other for first in alike for other in ranks_of[id(wants[first])]))
        if spec.is_plain:
            boxes, holders = [Box.whole(spec.shape)], wanting[alike]
        else:
            key = (spec.mesh_ranks, spec.mesh_shape, spec.axis_cuts, alike)
            if key not in places:
                places[key] = _place(
                    Layout((runs_of(spec.mesh_ranks),), spec.mesh_shape, spec.axis_cuts), rank, wanting[alike]
                )
            coordinate, holders = places[key]
            boxes = (
                [part.box for part in parts_of_cuts(spec.shape, spec.mesh_shape, coordinate, spec.axis_cuts)]
                if holders
                else []
            )
        if len(holders) > 1 and boxes:
            shared.setdefault(holders, {}).setdefault(name, []).extend(boxes)
    return shared


def _place(layout: Layout, rank: int, wanting: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A rank's coordinate, and which of those `wanting` have the same parts; none where it is not on the mesh."""
    location = layout.find(rank)
    if location is None:
        return (), ()
    return location[0], tuple(sorted({*layout.holders(location[0])}.intersection(wanting)))


def plan_shared(
    manifest: Manifest, boxes: Mapping[tuple[int, ...], Mapping[str, Sequence[Box]]], max_bytes: int = SHARED_BYTES
) -> list[SharedFetch]:
    """Plans the fetches that are read once for several ranks, in the order in which all of them exchange these; readers
    by bytes in turn.

    The plan for some ranks depends on what these share alone, so that each of them makes the same, whatever else it
    shares. Raises CheckpointCorruptError when the chunks don't cover what is wanted.
    """
    plan: list[SharedFetch] = []
    for holders, by_name in sorted(boxes.items()):
        # The first reader is not the same for all that share.
        start = sum(holders) % len(holders)
        least = [(0, turn, reader) for turn, reader in enumerate((*holders[start:], *holders[:start]))]
        for fetch in plan_fetches(plan_load(manifest, by_name), manifest.block_bytes, max_bytes):
            read_bytes, turn, reader = least[0]
            heapq.heapreplace(least, (read_bytes + fetch.num_bytes, turn, reader))
            plan.append(SharedFetch(fetch, holders, reader))
    return plan
