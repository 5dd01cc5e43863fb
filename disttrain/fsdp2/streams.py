"""CUDA streams for communication; on CPU all of it is nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


class CommStreams:
    """One stream for all-gathers and one for reduce-scatters, so that both run beside compute.

    High priority: a collective that waits behind a matmul makes the next matmul wait for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self._device = device
        self.gather = torch.cuda.Stream(device, priority=-1) if self.is_cuda else None
        self.reduce = torch.cuda.Stream(device, priority=-1) if self.is_cuda else None

    def gathering(self) -> AbstractContextManager[object]:
        """Work inside is queued on the all-gather stream."""
        return nullcontext() if self.gather is None else torch.cuda.stream(self.gather)

    def reducing(self) -> AbstractContextManager[object]:
        """Work inside is queued on the reduce-scatter stream."""
        return nullcontext() if self.reduce is None else torch.cuda.stream(self.reduce)

    def mark(self) -> torch.cuda.Event | None:
        """An event at this point of the current stream."""
        return torch.cuda.current_stream(self._device).record_event() if self.is_cuda else None

    def follow(self, event: torch.cuda.Event | None) -> None:
        """Queue nothing more on the current stream before `event`."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
