"""Operations of a step that is recorded as a graph: they are listed once, and each replay of the graph is told as one.

A graph repeats what GPUs do. The host's part of its operations, such as to number them, is done for all of them at
once at each replay, so that ranks count alike whether they replay a step or run it as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from disttrain.process_group.current import current_world, has_world


class Replays(Protocol):
    """The replays of one graph."""

    def begin_graph(self) -> None:
        """The graph begins here: called once, while it is recorded, before all else."""
        ...

    def end_graph(self) -> None:
        """The graph ends here: called once, while it is recorded."""
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
    """Replays that nobody records."""

    def begin_graph(self) -> None:
        pass

    def end_graph(self) -> None:
        pass

    def obstacle(self) -> str:
        return ""

    def begin(self, *, is_first: bool = False) -> None:
        pass

    def end(self) -> None:
        pass


@contextmanager
def listed_operations() -> Iterator[Replays]:
    """Has the recorder list what the current world's ranks call within, in place of recording it."""
    recorder = current_world("capture_step").recorder if has_world() else None
    if recorder is None:
        yield _Untold()
    else:
        with recorder.listing() as replays:
            yield replays
