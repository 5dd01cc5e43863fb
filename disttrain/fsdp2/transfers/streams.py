"""CUDA streams for communication; on CPU they do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

import torch

_NO_STREAM: Final = nullcontext()


class CommStreams:
    """A stream each for all-gathers, reduce-scatters, and sums over replicas, so that all run beside compute.

    High priority: a collective that waits behind a matmul makes the next matmul wait for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self._device = device
        # torch's streams and events for any device enter, record and wait without Python in between.
        self._gather, self._reduce, self._replicate = (
            torch.Stream(device, priority=-1) if self.is_cuda else None for _ in range(3)
        )

    def gathering(self) -> AbstractContextManager[object]:
        """Work inside is queued on the all-gather stream."""
        return _NO_STREAM if self._gather is None else self._gather

    def reducing(self) -> AbstractContextManager[object]:
        """Work inside is queued on the reduce-scatter stream."""
        return _NO_STREAM if self._reduce is None else self._reduce

    def replicating(self) -> AbstractContextManager[object]:
        """Work inside is queued on the stream of sums over replicas."""
        return _NO_STREAM if self._replicate is None else self._replicate

    @contextmanager
    def on(self, stream: torch.cuda.Stream | None, used: torch.Tensor) -> Iterator[None]:
        """Work inside is queued on the user's `stream`, between what came before and what comes after; `used` there."""
        if stream is None or not self.is_cuda:
            yield
            return
        current = torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        used.record_stream(stream)
        current.wait_stream(stream)

    def mark(self) -> torch.Event | None:
        """An event at this point of the current stream."""
        if not self.is_cuda:
            return None
        event = torch.Event(self._device)
        event.record()
        return event

    def follow(self, event: torch.Event | None) -> None:
        """Queue nothing more on the current stream before `event`."""
        if event is not None and self.is_cuda:
            event.wait()
