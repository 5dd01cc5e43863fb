"""Puts together what a ring says of recorded steps: the lists of their parts, and the slots of each replay.

A part has the operations of one group or channel, which are numbered by one count. A replay has one slot for each part
of its graph: the label is the number of the replay, and the sequence number that before it. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from disttrain.flight_recorder.record.record import CallSite, DeviceTimes
from disttrain.flight_recorder.record.replays import ListedCall, Replay, StepGraphCalls


class _Part(NamedTuple):
    graph: int
    part: int
    num_parts: int
    calls: Sequence[tuple[int, CallSite, str, str]]
    """Index among the operations of the graph, site, action, module."""


class _Slot(NamedTuple):
    number: int
    before: int
    began_ns: int
    ended_ns: int


class ListedParts:
    """The parts of graphs that have been read, and their replays."""

    def __init__(self) -> None:
        self._parts: dict[int, _Part] = {}
        self._slots: dict[tuple[int, int], dict[int, _Slot]] = {}

    def __bool__(self) -> bool:
        return bool(self._parts)

    def take(
        self, number: int, graph: int, index: int, num_parts: int, calls: Sequence[tuple[int, CallSite, str, str]]
    ) -> None:
        """Add a part. Raises ValueError for one that cannot be."""
        if not 0 <= index < num_parts:
            raise ValueError("a part that its graph does not have")
        self._parts[number] = _Part(graph, index, num_parts, calls)

    def has(self, number: int) -> bool:
        """True if `number` is that of a part."""
        return number in self._parts

    def replayed(self, part: int, number: int, replay: int, before: int, began_ns: int, ended_ns: int) -> None:
        """Add a slot, which is of a part."""
        graph, index, *_ = self._parts[part]
        self._slots.setdefault((graph, replay), {})[index] = _Slot(number, before, began_ns, ended_ns)

    def replays(
        self,
        seconds: Callable[[int], float],
        device_of: Callable[[int], DeviceTimes | None],
        progress: Mapping[int, Sequence[int]],
    ) -> tuple[Replay, ...]:
        """The replays of which all slots are left, oldest first.

        Args: device_of  the device's times of the slot of a number;  progress  of each graph, as `graph_progress` says.
        """
        graphs = self._graphs()
        numbered: list[tuple[int, Replay]] = []
        for (number, replay), slots in self._slots.items():
            if number not in graphs or len(slots) < graphs[number][1]:
                continue
            graph = graphs[number][0]
            before = tuple(slots[index].before for index in range(len(slots)))
            numbers = sorted(slot.number for slot in slots.values())
            ends_ns = [slot.ended_ns for slot in slots.values()]
            began_s = seconds(min(slot.began_ns for slot in slots.values()))
            ended_s = seconds(max(ends_ns)) if all(ends_ns) else None
            device = next((times for its in numbers if (times := device_of(its)) is not None), None)
            behind = not_come(progress[number], replay, len(graph.calls)) if number in progress else None
            numbered.append((numbers[0], Replay(graph, replay, before, began_s, ended_s, device, behind)))
        numbered.sort(key=itemgetter(0))
        return tuple(replay for _, replay in numbered)

    def _graphs(self) -> dict[int, tuple[StepGraphCalls, int]]:
        """Those of which all parts are known, and the number of these."""
        parts: dict[int, dict[int, _Part]] = {}
        for part in self._parts.values():
            parts.setdefault(part.graph, {})[part.part] = part
        graphs = {}
        for number, its in parts.items():
            if len(its) == next(iter(its.values())).num_parts and set(its) == set(range(len(its))):
                calls = [
                    (index, ListedCall(site, action, module, part.part))
                    for part in its.values()
                    for index, site, action, module in part.calls
                ]
                calls.sort(key=itemgetter(0))
                graphs[number] = StepGraphCalls(number, tuple(call for _, call in calls)), len(its)
        return graphs


def not_come(progress: Sequence[int], replay: int, num_calls: int) -> tuple[int, ...]:
    """Indexes of the operations that the device has not come to in a replay.

    `progress` is the last replay that has ended, then for each operation the last replay that has come to it, or -1
    where there is no mark: such an operation is passed together with the next that has one.
    """
    ended, *came = progress
    has_come = ended >= replay
    behind = []
    for index in reversed(range(num_calls)):
        if index < len(came) and came[index] >= 0:
            has_come = ended >= replay or came[index] >= replay
        if not has_come:
            behind.append(index)
    return tuple(reversed(behind))
