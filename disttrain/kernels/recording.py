"""Tells parts of a step that it is being recorded as a CUDA graph, and has them called at each replay.

A graph repeats what GPUs do. What the host does besides, such as counting steps, happens once, while it is recorded. A
part that does such things hands in a `HostPart`, by which it does them at each replay.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol, TypeVar

import torch

from disttrain.errors import BackendError

_Value = TypeVar("_Value")
_ALIGNMENT: Final = 2
_FOR_NUMBERS_THAT_CHANGE: Final = 1 << 12
"""64-bit numbers that tables leave room for."""


class HostPart(Protocol):
    """Work of the host in a recorded step."""

    def obstacle(self) -> str:
        """Why the recording can't be replayed any more, a whole sentence; empty where it can. Changes nothing."""
        ...

    def before_first(self) -> None:
        """Precedes the first replay, whose work of the host was done when it was recorded: only puts numbers there."""
        ...

    def before_replay(self) -> None:
        """Does what precedes the GPU's work, and puts numbers where that reads them."""
        ...

    def after_replay(self) -> None:
        """Does what follows each replay, the first one too, once the GPU's work is queued and writes are counted."""
        ...


class Recording:
    """The parts of a step whose work on GPUs is being recorded.

    Args: memory  (n,) int64 on the GPU, allocated before: what is allocated within, a graph uses for other things too.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.parts: list[HostPart] = []
        self.kept: dict[int, Any] = {}
        """What the graph reads, and nothing else need hold; by id."""
        self._memory = memory
        self._num_taken = 0
        self._tables: dict[object, torch.Tensor] = {}
        self._unwritten: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, part: HostPart) -> None:
        """Have `part` called at each replay, but not now: its own call is going on."""
        self.parts.append(part)

    def take(self, size: int) -> torch.Tensor:
        """(size,) int64, which the host may write before a replay."""
        begin, self._num_taken = self._num_taken, self._num_taken + size
        if self._num_taken > len(self._memory):
            problem = f"it needs more than {len(self._memory)} numbers that change in each replay."
            raise BackendError("capture_step", problem, "Record fewer optimizers or groups of parameters together.")
        return self._memory[begin : self._num_taken]

    def table(self, values: torch.Tensor, key: object = None) -> torch.Tensor | None:
        """The values in the graph's memory from `write_tables` on, those of one `key` once; None where that is full."""
        if key is not None and key in self._tables:
            return self._tables[key]
        # Each begins where a kernel may read many bytes at once.
        begin = -(-self._num_taken // _ALIGNMENT) * _ALIGNMENT
        end = begin - (-values.nbytes // self._memory.itemsize)
        if end + _FOR_NUMBERS_THAT_CHANGE > len(self._memory):
            return None
        self._num_taken = end
        table = self._memory[begin:end].view(values.dtype)[: values.numel()].view(values.shape)
        self._unwritten.append((table, values))
        if key is not None:
            self._tables[key] = table
        return table

    def write_tables(self) -> None:
        """Write what `table` was given: after the recording, before its first replay, on the current stream."""
        for table, values in self._unwritten:
            table.copy_(values)
        self._unwritten.clear()


_OF_OTHERS: Final[dict[int, Any]] = {}
"""As `Recording.kept`, of graphs that are none of ours: nobody tells when they are gone."""

_STACK: Final[list[Recording]] = []
"""One at most. Of the process, not of a thread: a backward, which belongs to the step, runs on another one."""


def current_recording() -> Recording | None:
    """The recording that is going on in this process."""
    return _STACK[-1] if _STACK else None


def kept_for_graph(value: _Value, device: torch.device) -> _Value:
    """Returns `value`, of a cache. A graph that is captured on `device` reads its memory at each replay, so it is kept
    as long as the graph: the cache may let go of it."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        recording = current_recording()
        (_OF_OTHERS if recording is None else recording.kept)[id(value)] = value
    return value


@contextmanager
def recording(memory: torch.Tensor) -> Iterator[Recording]:
    """Let parts of the step add themselves within; see `Recording`."""
    _STACK.append(Recording(memory))
    try:
        yield _STACK[-1]
    finally:
        _STACK.pop()
