"""CUDA streams of a rank's stages: one for all, or one for each if forwards and backwards run side by side.

The two children of an OVERLAP belong to two stages. With a stream for each, the device can run one child while the
other leaves it idle, for example during a collective of the backward. On the CPU they run one after the other: threads
would let the collectives of two stages race each other, in another order on each rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

import torch
from torch import nn

from disttrain.pipelining.runtime.buffers import Buffers

_MAX_PASSES_AHEAD = 2
"""The number of passes that the host has queued and the device has not finished."""


class Streams:
    """Streams, and buffers for what is received, of one rank's stages."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[int, torch.cuda.Stream] = {}
        self._own: dict[int, torch.cuda.Stream] = {}
        self._buffers: dict[int | None, Buffers] = {}
        self._ends: deque[torch.cuda.Event] = deque()

    def begin(self, stages: Iterable[int]) -> None:
        """From now on `stages` run side by side. They follow what is on the current stream."""
        if self._device.type != "cuda":
            return
        for stage in stages:
            stream = self._made.get(stage) or self._made.setdefault(stage, torch.cuda.Stream(self._device))
            stream.wait_stream(torch.cuda.current_stream(self._device))
            self._own[stage] = stream

    def end(self) -> None:
        """The current stream follows all of them."""
        for stream in self._own.values():
            torch.cuda.current_stream(self._device).wait_stream(stream)
        self._own = {}

    def forget(self) -> None:
        """Ends it after an error. Where a recording as a CUDA graph has failed, nothing can be waited for."""
        with suppress(RuntimeError):
            self.end()
        self._own = {}

    def hold_back(self) -> None:
        """At the end of a pass, the host waits for the end of an earlier one. Otherwise it would queue pass after pass,
        with receive buffers for each. If a rank fails, all streams go on, so this wait ends, too."""
        if self._device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        end = torch.cuda.Event(blocking=True)
        end.record(torch.cuda.current_stream(self._device))
        self._ends.append(end)
        if len(self._ends) > _MAX_PASSES_AHEAD:
            self._ends.popleft().synchronize()

    def of(self, stage: int) -> AbstractContextManager[object]:
        """Within, what is computed is on the stage's stream."""
        return torch.cuda.stream(self._own[stage]) if self._own else _SAME

    @property
    def run_side_by_side(self) -> bool:
        """True while stages have streams of their own."""
        return bool(self._own)

    def forget_buffers(self) -> None:
        """Let go of all that are free."""
        self._buffers.clear()

    def buffers(self, stage: int) -> Buffers:
        """Returns the buffers that this stage receives into: free as of its own stream."""
        key = stage if self._own else None
        return self._buffers.get(key) or self._buffers.setdefault(key, Buffers(self._device))

    def mark(self, stage: int) -> torch.cuda.Event | None:
        """Marks what `stage` has been given to compute so far; None where all stages are on one stream."""
        if not self._own:
            return None
        made = torch.cuda.Event()
        made.record(self._own[stage])
        return made

    def follow(self, stage: int, made: torch.cuda.Event | None, tensors: Sequence[torch.Tensor]) -> None:
        """`stage` goes on with `tensors` that another stage on this rank had made at that mark.

        It does not wait for later work of the other stage: it runs beside that.
        """
        if made is None:
            return
        self._own[stage].wait_event(made)
        for tensor in tensors:
            # Its memory must not be reused on the stream that it was allocated on while it is read here.
            tensor.record_stream(self._own[stage])


def are_apart(modules: Iterable[nn.Module]) -> bool:
    """True when no two have a parameter in common. Where two have, sums into its gradient on two streams would race."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return len(set(parameters)) == len(parameters)


_SAME: AbstractContextManager[object] = nullcontext()
