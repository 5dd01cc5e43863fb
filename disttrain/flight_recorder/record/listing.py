"""The operations of a step that is recorded as a graph, and what the host does for all of them at each replay.

They are numbered by the counts of their groups and channels, as if the step ran as it is. So ranks that replay a step
more often than others, or another step, are told apart as ranks that call more, or other things.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import torch

from disttrain.errors import DisttrainError
from disttrain.flight_recorder.record.recall import recall_sites
from disttrain.flight_recorder.record.record import RECEIVE, SEND
from disttrain.process_group.watching.replaying import ended_group

if TYPE_CHECKING:
    from disttrain.flight_recorder.record.ring.descriptions import Descriptions, Site
    from disttrain.process_group.interfaces import GroupLike

IsOfGraph = Callable[[Sequence[torch.Tensor], "GroupLike"], bool]
"""True if an operation of these tensors in this group becomes a part of the graph that is being recorded."""

NO_MARK: Final = -1
_NUM_PAST: Final = 64
"""Replays that a host may be ahead of its device; a driver queues fewer."""


class Progress(Protocol):
    """The progress of a device in a graph, by marks that are within the graph."""

    def begin_graph(self) -> None:
        """The graph begins here, as it is recorded."""
        ...

    def comes(self, index: int) -> bool:
        """Mark that the device comes to operation `index` here. False where there is no room for another."""
        ...

    def end_graph(self) -> None:
        """The graph ends here."""
        ...

    def read(self) -> list[int]:
        """The last replay that has ended; then of each operation the last that has come to it. Waits for nothing."""
        ...


class Slots(Protocol):
    """The recorder, by which a replay is told."""

    current_listing: Listing | None

    def content(self) -> bytes:
        """As `FlightRecorder.content`."""
        ...

    def begin_part(self, part: Part, replay: int, *, is_marked: bool) -> tuple[int, int]:
        """As `FlightRecorder.begin`, of a part of a graph; `is_marked` on the device too."""
        ...

    def end(self, record: tuple[int, int], error: DisttrainError | None) -> None:
        """As `FlightRecorder.end`."""
        ...


class Part:
    """The operations of a graph that one count numbers, that of a group or channel.

    Attributes: `counter`, the word of the count; `messages`, what numbers them if they are messages, with `peer_rank`,
    a group rank; `before`, the number before the latest replay, and `past` that before each of the last replays;
    `calls`, of each the place in the graph, the number of its site and its label.
    """

    __slots__ = (
        *("before", "calls", "counter", "group", "is_collective", "last_operation", "messages", "num_calls"),
        *("number", "past", "peer_rank"),
    )

    def __init__(self, group: GroupLike, site: Site, operation: str, peer_rank: int | None, before: int) -> None:
        self.group = group
        self.counter = site.counter
        self.messages = site.messages
        self.is_collective = operation not in (SEND, RECEIVE)
        self.peer_rank = None if self.is_collective else peer_rank
        self.before = before
        self.past: deque[int] = deque(maxlen=_NUM_PAST)
        self.calls: list[tuple[int, int, int]] = []
        self.num_calls = 0
        self.number = 0
        self.last_operation = ""

    def advance(self) -> None:
        """Number the calls of one more replay."""
        if self.messages is not None:
            self.before = next(self.messages) - 1
            deque(itertools.islice(self.messages, self.num_calls - 1), maxlen=0)
        elif self.is_collective:
            group = self.group
            self.before = group.sequence
            group.sequence += self.num_calls
            group.last_operation = self.last_operation


class Listing:
    """The operations of a recorded step, and its replays. `number` counts the recorder's graphs from 1.

    Attributes: `failure`, what has ended an operation of an earlier replay; `num_replays`, so far; `called`: of each
    operation its part, sequence number in the first replay, name, and label's texts.
    """

    def __init__(
        self,
        recorder: Slots,
        descriptions: Descriptions,
        number: int,
        progress: Progress | None,
        is_of_graph: IsOfGraph,
    ) -> None:
        self.number = number
        self.takes = is_of_graph
        self.parts: Sequence[Part] = ()
        self.failure: DisttrainError | None = None
        self.num_replays = 0
        self.numbers: set[int] = set()
        """Of sites, labels and parts that must stay described."""
        self.called: list[tuple[Part, int, str, str, str]] = []
        self._recorder = recorder
        self._descriptions = descriptions
        self._progress = progress
        self._has_mark: list[bool] = []
        self._of_counts: dict[tuple[str, int], Part] = {}
        self._records: list[tuple[int, int]] = []

    def add(
        self, site: Site, label: int, group: GroupLike, operation: str, peer_rank: int | None, sequence: int
    ) -> None:
        """List an operation that is about to be recorded."""
        key = group.group_name, site.counter
        part = self._of_counts.get(key)
        if part is None:
            part = self._of_counts[key] = Part(group, site, operation, peer_rank, max(0, sequence - 1))
        index = len(self.called)
        part.calls.append((index, site.number, label))
        part.num_calls += 1
        part.last_operation = operation
        self.numbers.update((site.number, label))
        world = group.world
        self.called.append((part, part.num_calls, operation, world.action, world.module))
        # A group of one rank waits for nobody, and what is handed over together begins together.
        can_wait = group.group_size > 1 and not group.coalesced
        self._has_mark.append(can_wait and self._progress is not None and self._progress.comes(index))

    def __enter__(self) -> Self:
        """From here on calls are listed."""
        self._descriptions.keep_for(self)
        self._recorder.current_listing = self
        return self

    def __exit__(self, *_: object) -> None:
        """The graph has been recorded, or can't be."""
        self._recorder.current_listing = None
        parts = list(self._of_counts.values())
        for index, part in enumerate(parts):
            part.number = self._descriptions.part(self.number, index, len(parts), part.calls)
            self.numbers.add(part.number)
        self.parts = parts

    def begin_graph(self) -> None:
        """As `replaying.Replays`."""
        if self._progress is not None:
            self._progress.begin_graph()

    def end_graph(self) -> None:
        """Likewise."""
        if self._progress is not None:
            self._progress.end_graph()

    def recorded(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Likewise."""
        parts = [part for part in self.parts if part.is_collective and part.group.group_size > 1]
        called = [[(site, self.called[index][4]) for index, site, _ in part.calls] for part in parts]
        recalled = recall_sites(self._recorder.content(), called) if parts else []
        return {part.group.group_name: calls for part, calls in zip(parts, recalled, strict=True)}

    def obstacle(self) -> str:
        """Likewise: where a group has ended, unless `begin` says why."""
        if self.failure is not None or not self.parts:
            return ""
        return ended_group(self.parts[0].group.world.groups)

    def begin(self, *, is_first: bool = False) -> None:
        """Likewise."""
        if self.failure is not None:
            raise self.failure
        self.num_replays += 1
        for part in self.parts:
            if not is_first:
                part.advance()
            part.past.append(part.before)
        begin_part, replay = self._recorder.begin_part, self.num_replays
        self._records = [begin_part(part, replay, is_marked=not index) for index, part in enumerate(self.parts)]

    def end(self) -> None:
        """Likewise."""
        for record in self._records:
            self._recorder.end(record, None)

    def progress(self) -> list[int] | None:
        """As `Progress.read`, with NO_MARK for operations without one; None where nobody marks."""
        if self._progress is None:
            return None
        ended, *came = self._progress.read()
        pairs = zip(came, self._has_mark, strict=False)
        return [ended, *(replay if has_mark else NO_MARK for replay, has_mark in pairs)]


def is_captured(tensors: Sequence[torch.Tensor], group: GroupLike) -> bool:
    """True if a GPU carries the operation out, and the current stream is being captured: a host's is no part of it."""
    is_on_device = tensors[0].is_cuda if tensors else group.serves("cuda")
    return is_on_device and torch.cuda.is_current_stream_capturing()
