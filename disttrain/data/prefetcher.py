"""Batches that are made and sent to the device by a thread, while the trainer computes on those before.

The thread is some batches ahead, so what it has read is not what the trainer has had: each batch comes with the
source's state after it, and `state_dict` is that of the last one handed out.
"""

from __future__ import annotations

import copy
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Self

import torch

from disttrain.data.moving import Mover
from disttrain.errors import DataError
from disttrain.process_group.watching.ranges import named_in_traces

_POLL_S = 5.0
"""A thread that has died, as in a fork of the process, tells nobody."""


class Prefetcher(Iterator[Any]):
    """Iterates over the batches of `source`, on `device`.

    Args:    source     an iterable: a `Loader`, a `StreamLoader`, torch's `DataLoader`, torchdata's
                        `StatefulDataLoader`. Its iteration runs in the thread.
             device     where tensors of a batch go, within dicts, lists and tuples, and objects with a method `to`. On
                        CUDA they pass pinned memory and a stream of the thread's own. None: they stay.
             num_ahead  how many batches may wait to be taken.
             timeout_s  how long `next` waits for a batch.
    At the end of an iteration of `source`, `next` raises StopIteration, and the one after it begins another. What the
    source raises, `next` raises in its turn; the one after it begins anew, from where the source is then.
    Raises:  DataError from `next`, with the line at which the thread is, when no batch comes in time.
    Close it when it is not read to its end, or use it as a context manager; one that nobody has any more ends, too.
    """

    def __init__(
        self,
        source: Iterable[Any],
        device: torch.device | str | None = None,
        *,
        num_ahead: int = 2,
        timeout_s: float = 600.0,
    ) -> None:
        if num_ahead < 1:
            raise DataError("Prefetcher", f"num_ahead is {num_ahead}.", "Give 1 or more.")
        self._source = source
        self._mover = Mover(None if device is None else torch.device(device))
        self._num_ahead = num_ahead
        self._timeout_s = timeout_s
        self._line: _Line | None = None
        self._state: Any = None
        self._is_closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._is_closed:
            raise DataError("Prefetcher", "it is closed.", "Make another one.")
        if self._line is None:
            self._begin()
        assert self._line is not None
        item = self._line.take(self._timeout_s)
        if isinstance(item, _End):
            # All that was read has been handed out: the source is where the trainer is.
            self._end()
            self._state = None
            if item.error is None:
                raise StopIteration
            raise item.error
        batch, self._state = item
        return self._mover.received(batch)

    def state_dict(self) -> dict[str, Any]:
        """The source's state after the last batch that was handed out."""
        state: dict[str, Any] = _state_of(self._source) if self._state is None else copy.deepcopy(self._state)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there; what was read ahead is forgotten."""
        self._end()
        self._state = None
        _stateful(self._source).load_state_dict(state_dict)

    def close(self) -> None:
        """End the thread, and forget what was read ahead: a source with a state goes back there. Idempotent."""
        self._is_closed = True
        if self._end() and self._state is not None:
            self._source.load_state_dict(self._state)  # type: ignore[attr-defined]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self) -> None:
        has_state = hasattr(self._source, "state_dict")
        self._state = _state_of(self._source) if has_state else None
        self._line = line = _Line(self._num_ahead)
        # It holds the line and the source, not the prefetcher: else nobody would ever be the last to have that.
        line.thread = threading.Thread(
            target=_fill, args=(line, self._source, self._mover, has_state), name="disttrain-data", daemon=True
        )
        weakref.finalize(self, line.stop).atexit = False
        line.thread.start()

    def _end(self) -> bool:
        """Returns whether there was a thread, which has ended."""
        line, self._line = self._line, None
        if line is None:
            return False
        line.stop()
        # A source that blocks is left behind, since a thread cannot be ended.
        line.thread.join(timeout=_POLL_S)
        return not line.thread.is_alive()


class _End:
    """An iteration is over: at its end, or by an exception."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class _Line:
    """Batches between the thread and the trainer, at most `num_ahead`."""

    def __init__(self, num_ahead: int) -> None:
        self._items: deque[Any] = deque()
        self._changed = threading.Condition()
        self._num_ahead = num_ahead
        self._is_stopped = False
        self.thread: threading.Thread = threading.current_thread()

    def put(self, item: Any) -> bool:
        """Wait for room. Returns False, without it, where nobody wants more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or len(self._items) < self._num_ahead)
            if not self._is_stopped:
                self._items.append(item)
                self._changed.notify_all()
            return not self._is_stopped

    @named_in_traces("data wait")
    def take(self, timeout_s: float) -> Any:
        """The next one. Raises: DataError when there is none in time."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while not self._items:
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0 or not self.thread.is_alive():
                    break
                self._changed.wait(min(remaining_s, _POLL_S))
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
        problem = f"no batch has come within {timeout_s:g} s{self._standing()}."
        raise DataError("Prefetcher", problem, "See what the source waits for, or give a longer timeout_s.")

    def stop(self) -> None:
        """No more is wanted."""
        with self._changed:
            self._is_stopped = True
            self._items.clear()
            self._changed.notify_all()

    def _standing(self) -> str:
        frame = sys._current_frames().get(self.thread.ident or 0)
        if frame is None:
            return "; its thread is gone"
        last = traceback.extract_stack(frame)[-1]
        return f"; its thread is at {last.filename}:{last.lineno}, in {last.name}"


def _fill(line: _Line, source: Iterable[Any], mover: Mover, has_state: bool) -> None:
    """The thread."""
    error: BaseException | None = None
    try:
        mover.enter_thread()
        for batch in source:
            state = _state_of(source) if has_state else None
            if not line.put((mover.sent(batch), state)):
                return
    except BaseException as raised:  # noqa: BLE001  whatever it is, the trainer shall hear of it
        error = raised
    line.put(_End(error))


def _state_of(source: Any) -> Any:
    # Copied, since a source may go on writing into what it has given.
    return copy.deepcopy(_stateful(source).state_dict())


def _stateful(source: Any) -> Any:
    if hasattr(source, "state_dict") and hasattr(source, "load_state_dict"):
        return source
    problem = f"a {type(source).__name__} has no state_dict and load_state_dict."
    raise DataError("Prefetcher", problem, "Give a Loader or torchdata's StatefulDataLoader, which go on from a state.")
