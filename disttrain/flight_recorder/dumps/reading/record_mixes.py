"""Decodes records whose numbers take different numbers of bytes, as those of several groups do, all at once.

They are divided by how they are encoded, and each part is decoded as a run. Torch-free.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from disttrain.flight_recorder.dumps.reading.record_runs import HEAD, LEAST, Run, find_run

_MAX_PARTS: Final = 64
"""Files with more ways to encode a record are not such as are written here."""


@dataclass
class Mix:
    """`num_records` records, the newest first, which take `num_bytes`: runs with the positions of their records."""

    num_records: int
    num_bytes: int
    parts: list[tuple[list[int], Run]]

    def order(self) -> list[int]:
        """For each record, its place among those of all parts, one part after the other."""
        positions = list(chain.from_iterable(part for part, _ in self.parts))
        return sorted(range(len(positions)), key=positions.__getitem__)


def find_mix(data: bytes, start: int, stop: int) -> Mix | None:
    """The records from `start` on, as far as nothing else is among them; None where they are few."""
    # A number may look like the beginning of a record. Then the parts are not as long as what they are decoded to.
    nothing, *bodies = data[start:stop].split(HEAD)
    if nothing:
        return None
    if b"" in bodies:  # cut off, or no record
        del bodies[bodies.index(b"") :]
    lengths = [*map(len, bodies)]
    alike: dict[int, list[int]] = {length: [] for length in dict.fromkeys(lengths)}
    if len(alike) > _MAX_PARTS:
        return None
    for position, length in enumerate(lengths):
        alike[length].append(position)
    num_records = len(bodies)
    parts = []
    waiting = [*alike.values()]
    while waiting:
        positions = waiting.pop()
        region = HEAD + HEAD.join(map(bodies.__getitem__, positions))
        run = find_run(region, 0, len(region), least=1)
        is_whole = run is not None and run.num_bytes * len(positions) == len(region) * run.num_records
        num_known = run.num_records if run is not None and is_whole else 0
        if num_known < len(positions) and (divided := _divided(bodies, positions)):
            waiting += divided
            continue
        if num_known < len(positions):
            num_records = min(num_records, positions[num_known])
        if run is not None and num_known:
            parts.append((positions, run))
    if num_records < LEAST:
        return None
    cut = []
    for positions, run in parts:
        if count := bisect_left(positions, num_records):
            cut.append((positions[:count], run.first(count)))
    return Mix(num_records, sum(map(len, bodies[:num_records])) + num_records * len(HEAD), cut)


def _divided(bodies: Sequence[bytes], positions: Sequence[int]) -> list[list[int]]:
    """Divides records of one length by the bytes of two of their numbers; nothing where these are alike, too."""
    alike: dict[tuple[int, int], list[int]] = {}
    for position in positions:
        body = bodies[position]
        alike.setdefault((body[0] if body[0] > 0x7F else 0, body.find(b"ed", 0, 24)), []).append(position)
    return [*alike.values()] if 1 < len(alike) <= _MAX_PARTS else []
