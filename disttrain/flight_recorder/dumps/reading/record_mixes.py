"""Decodes records whose numbers take different numbers of bytes, as those of several groups do, all at once.

They are divided by how they are encoded, and each part is decoded as a run. Torch-free.
"""

from __future__ import annotations

from bisect import bisect_left
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
    # Records that are encoded alike, and few others, have in common their lengths and the bytes of two numbers.
    kinds = [(len(body), body[0] if body[0] > 0x7F else 0, body.find(b"ed", 0, 24)) for body in bodies]
    alike: dict[tuple[int, int, int], list[int]] = {kind: [] for kind in dict.fromkeys(kinds)}
    if len(alike) > _MAX_PARTS:
        return None
    for position, kind in enumerate(kinds):
        alike[kind].append(position)
    num_records = len(bodies)
    parts = []
    for positions in alike.values():
        region = b"".join([HEAD + bodies[position] for position in positions])
        run = find_run(region, 0, len(region), least=1)
        is_whole = run is not None and run.num_bytes * len(positions) == len(region) * run.num_records
        num_known = run.num_records if run is not None and is_whole else 0
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
