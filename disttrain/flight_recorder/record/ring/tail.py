"""Reads the operations that have ended since the last read from this process's own ring, without decoding all of it."""

from __future__ import annotations

import itertools
from typing import Final

from disttrain.flight_recorder.live.step_tally import Ended
from disttrain.flight_recorder.record.recorder import FlightRecorder
from disttrain.flight_recorder.record.ring import layout
from disttrain.flight_recorder.record.ring.descriptions import MAX_SITES
from disttrain.ranks import Ranks

_SLOT_BYTES: Final = layout.SLOT.size
_unpack: Final = layout.SLOT.unpack_from


class RingTail:
    """Follows `recorder`'s calls from now on, in the order in which they begin. Not for several threads at once."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder
        ring = recorder.ring
        self._slots = memoryview(ring.memory)[ring.slots_at : ring.slots_at + _SLOT_BYTES * ring.num_slots]
        begun = (slot[0] for slot in layout.SLOT.iter_unpack(self._slots) if slot[5])
        self._next = max(begun, default=-1) + 1
        self._num_slots = ring.num_slots
        self._under_way: list[int] = []
        self._called: dict[int, tuple[str, str, str] | None] = {}

    def ended(self) -> list[Ended]:
        """The calls that have ended since the last time. Those that the ring has lost by now are left out, and those of
        groups of one rank, which send nothing."""
        result: list[Ended] = []
        under_way, self._under_way = self._under_way, []
        for number in itertools.chain(under_way, itertools.count(self._next)):
            offset = _SLOT_BYTES * (number % self._num_slots)
            slot_number, site, _, _, _, began_ns, waits_ns, ended_ns, again = _unpack(self._slots, offset)
            if slot_number != number or again != number or not began_ns:
                if number < self._next:
                    continue
                self._next = number
                if slot_number < number or again != slot_number or not began_ns:
                    break
                # The ring has gone round since: what it still has begins here.
                self._next = slot_number - self._num_slots + 1
                return result + self.ended()
            if not ended_ns:
                self._under_way.append(number)
            elif called := self._called[site] if site in self._called else self._learnt(site):
                result.append(Ended(*called, began_ns, waits_ns or began_ns, ended_ns))
        return result

    def _learnt(self, site: int) -> tuple[str, str, str] | None:
        if len(self._called) > MAX_SITES:
            self._called.clear()
        entry = self._recorder.called_at(site)
        if entry is None:
            return None
        (_, name, ranks, axis_name, _), operation = entry
        # A mesh may have been made of a group that was used before, when the ring described it.
        group = None if axis_name else self._recorder.world.group_named(name)
        axis_name = axis_name if group is None else group.axis_name
        self._called[site] = called = (name, axis_name, operation) if len(Ranks.from_plain(ranks)) > 1 else None
        return called
