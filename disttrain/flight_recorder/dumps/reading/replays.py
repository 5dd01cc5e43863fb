"""Takes what a dump says of recorded steps and their replays. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from disttrain.flight_recorder.dumps.reading.checked_values import as_int, as_ints, at, device_times, finite
from disttrain.flight_recorder.record.record import CallSite
from disttrain.flight_recorder.record.replays import ListedCall, Replay, StepGraphCalls


class ReadReplays:
    """The recorded steps and replays that a file has so far, the newest first."""

    def __init__(self) -> None:
        self._graphs: list[StepGraphCalls] = []
        self._replays: list[Replay] = []

    def take(self, item: Any, sites: Sequence[CallSite], labels: Sequence[tuple[str, str]]) -> None:
        """Add what `item` says. Raises ValueError, TypeError or LookupError for one that cannot be."""
        match item:
            case ["graph", int(number), [*calls]]:
                listed = (ListedCall(at(sites, site), *at(labels, label), as_int(part)) for site, label, part in calls)
                self._graphs.append(StepGraphCalls(number, tuple(listed)))
            case ["replay", graph, int(number), [*before], began_s, ended_s, device, not_come]:
                end_s = None if ended_s is None else finite(ended_s)
                behind = None if not_come is None else as_ints(not_come)
                its_graph, counts = at(self._graphs, graph), as_ints(before)
                for call in its_graph.calls:
                    at(counts, call.part)
                fields = its_graph, number, counts, finite(began_s), end_s, device_times(device), behind
                self._replays.append(Replay(*fields))
            case _:
                raise ValueError("an array that no dump has")

    def oldest_first(self) -> tuple[Replay, ...]:
        return tuple(reversed(self._replays))
