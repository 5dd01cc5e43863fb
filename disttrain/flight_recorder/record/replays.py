"""Replays of a recorded step, as values: its list of operations, once, and how far the device is in each replay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from disttrain.flight_recorder.record.record import CallSite, DeviceTimes, Record, State


class ListedCall(NamedTuple):
    """An operation of a recorded step. `part`: which count it is numbered by, that of its group or channel."""

    site: CallSite
    action: str
    module: str
    part: int


@dataclass(frozen=True, slots=True)
class StepGraphCalls:
    """The operations of a recorded step, in the order in which they were called. `number` counts this rank's graphs."""

    number: int
    calls: tuple[ListedCall, ...]


class Replay(NamedTuple):
    """One replay of a recorded step, as seen by one rank. Times are seconds since the epoch, by this rank's clock.

    `number` counts the replays of the graph from 1. `before`: of each part, the sequence number before the replay.
    `completed_s` is when the host had launched it. `not_come`: indexes of the calls that the device has not come to;
    None where nobody has looked. `device` is that of the whole.
    """

    graph: StepGraphCalls
    number: int
    before: tuple[int, ...]
    enqueued_s: float
    completed_s: float | None = None
    device: DeviceTimes | None = None
    not_come: tuple[int, ...] | None = None

    @property
    def title(self) -> str:
        return f"replay {self.number} of step graph {self.graph.number}"


def records_of(replay: Replay) -> Iterator[Record]:
    """The operations of a replay as records, as if they had been called one by one and left by the host at once."""
    counts = list(replay.before)
    ended_s = replay.enqueued_s if replay.completed_s is None else replay.completed_s
    title = replay.title
    come, behind = _device_times(replay)
    not_come = frozenset(replay.not_come or ())
    for index, (site, action, module, part) in enumerate(replay.graph.calls):
        counts[part] += 1
        device = behind if index in not_come else come
        fields = site, counts[part], State.COMPLETED, replay.enqueued_s, ended_s, None, action, module
        yield Record(*fields, device, replay=title)


def _device_times(replay: Replay) -> tuple[DeviceTimes | None, DeviceTimes | None]:
    """The times of the operations that the device has come to, and of those that it has not."""
    device = replay.device
    if device is None or device.came_s is None:
        return device, device
    if device.left_s is not None:
        # That of each is not known: as if all had been at the end, so that nobody is said to have waited.
        return (DeviceTimes(device.left_s, device.left_s),) * 2
    return (None, None) if replay.not_come is None else (DeviceTimes(device.came_s), DeviceTimes())
