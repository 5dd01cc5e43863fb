"""Operations of a step that is recorded as a graph: they are listed once, and each replay of the graph is told as one.

A graph repeats what GPUs do. The host's part of its operations, such as to number them, is done for all of them at
once at each replay, so that ranks count alike whether they replay a step or run it as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from disttrain.process_group.current import current_world, has_world
from disttrain.process_group.interfaces import GroupLike


class Replays(Protocol):
    """The replays of one graph."""

    def begin_graph(self) -> None:
        """The graph begins here: called once, while it is recorded, before all else."""
        ...

    def end_graph(self) -> None:
        """The graph ends here: called once, while it is recorded."""
        ...

    def recorded(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """The graph's collectives with other ranks, by group, as `recorded_alike.RecordedCall`, as far as known."""
        ...

    def obstacle(self) -> str:
        """Why the graph's operations can't be replayed any more, a whole sentence; empty where they can."""
        ...

    def begin(self, *, is_first: bool = False) -> None:
        """The graph is about to be launched. The operations of the first replay were numbered when it was recorded.

        Raises: what has ended an operation of an earlier replay.
        """
        ...

    def end(self) -> None:
        """The graph has been launched, after `begin`."""
        ...


class _Untold:
    """Replays that nobody records, of a step that may use these groups."""

    def __init__(self, groups: Sequence[GroupLike]) -> None:
        self._groups = groups

    def begin_graph(self) -> None:
        pass

    def end_graph(self) -> None:
        pass

    def recorded(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        return {}

    def obstacle(self) -> str:
        return ended_group(self._groups)

    def begin(self, *, is_first: bool = False) -> None:
        pass

    def end(self) -> None:
        pass


@contextmanager
def listed_operations() -> Iterator[Replays]:
    """Has the recorder list what the current world's ranks call within, in place of recording it."""
    world = current_world("capture_step") if has_world() else None
    if world is None or world.recorder is None:
        yield _Untold(() if world is None else world.groups)
    else:
        with world.recorder.listing() as replays:
            yield replays


def ended_group(groups: Iterable[GroupLike]) -> str:
    """Tells which of these groups has ended, as `Replays.obstacle` says it; empty where none has."""
    return next((f"group {group.group_name} has ended: {group.ended_by}" for group in groups if group.ended_by), "")
