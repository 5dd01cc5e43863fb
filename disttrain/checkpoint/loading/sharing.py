"""Plans which rank reads for which: bytes that several ranks need are read by one of them. Pure.

The plan is a function of what all ranks need, so that each can make it by itself, as for a save.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from disttrain.checkpoint.format.box import Box
from disttrain.checkpoint.format.manifest import Manifest
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


def shared_boxes(wants: Sequence[Wants]) -> dict[tuple[int, ...], dict[str, list[Box]]]:
    """Parts that several ranks want alike: by those ranks, then by name."""
    shared: dict[tuple[int, ...], dict[str, list[Box]]] = {}
    layouts: dict[TensorSpec, dict[Box, tuple[int, ...]]] = {}
    for name, spec, ranks in _wanted(wants):
        if spec.is_plain:
            whole = Box.whole(spec.shape)
            holders_of = {whole: ranks} if whole.num_elements else {}
        elif None in spec.cuts:
            holders_of = layouts.get(spec) or layouts.setdefault(spec, spec.boxes())
        else:  # no two ranks have the same part
            continue
        for box, holders in holders_of.items():
            alike = tuple(sorted(set(holders) & set(ranks)))
            if len(alike) > 1:
                shared.setdefault(alike, {}).setdefault(name, []).append(box)
    return shared


def plan_shared(
    manifest: Manifest, boxes: Mapping[tuple[int, ...], Mapping[str, Sequence[Box]]], max_bytes: int = SHARED_BYTES
) -> list[SharedFetch]:
    """Plans the fetches that are read once for several ranks, in the order in which all of them exchange these; readers
    by bytes in turn.

    Raises CheckpointCorruptError when the chunks don't cover what is wanted.
    """
    plan: list[SharedFetch] = []
    read_bytes: dict[int, int] = {}
    for holders, by_name in sorted(boxes.items()):
        for fetch in plan_fetches(plan_load(manifest, by_name), manifest.block_bytes, max_bytes):
            reader = min(holders, key=lambda rank: read_bytes.get(rank, 0))
            read_bytes[reader] = read_bytes.get(reader, 0) + fetch.num_bytes
            plan.append(SharedFetch(fetch, holders, reader))
    return plan


def _wanted(wants: Sequence[Wants]) -> Iterator[tuple[str, TensorSpec, tuple[int, ...]]]:
    """Yields each tensor by name, with its spec and the ranks that want it so."""
    if all(wanted is wants[0] for wanted in wants):
        every = tuple(range(len(wants)))
        for name, spec in wants[0].items():
            yield name, spec, every
        return
    ranks: dict[tuple[str, TensorSpec], list[int]] = {}
    for rank, wanted in enumerate(wants):
        for key in wanted.items():
            ranks.setdefault(key, []).append(rank)
    for (name, spec), holders in ranks.items():
        yield name, spec, tuple(holders)
