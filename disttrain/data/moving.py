"""Sends a batch to the device from a thread, beside what computes there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch


class _Sent(NamedTuple):
    """A batch on its way, and what its arrival is known by."""

    batch: Any
    arrival: torch.cuda.Event


class Mover:
    """Moves batches to a device: `sent` in the thread, `received` in the trainer's.

    On CUDA a batch is copied from pinned memory on a stream of its own. The trainer's stream waits for the copy, not
    the trainer; and the allocator is told that this stream uses the memory now, or it would give it to the next copy.
    """

    def __init__(self, device: torch.device | None) -> None:
        if str(device) == "cuda":
            # That of the trainer's thread, not of the one that sends.
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    @property
    def _is_cuda(self) -> bool:
        return self._device is not None and self._device.type == "cuda"

    def enter_thread(self) -> None:
        """The thread that sends begins."""
        if self._is_cuda:
            # CUDA's current device is each thread's own, and 0 at first.
            torch.cuda.set_device(self._device)
            self._stream = self._stream or torch.cuda.Stream(self._device)

    def sent(self, batch: Any) -> Any:
        """The batch on the device, or on its way."""
        if self._device is None:
            return batch
        if self._stream is None:
            return mapped(lambda value: value.to(self._device), batch)
        pinned = mapped(_pinned, batch)
        with torch.cuda.stream(self._stream):
            # The allocator of pinned memory sees the copy, and waits for it before it gives the memory away.
            moved = mapped(lambda value: value.to(self._device, non_blocking=True), pinned)
            return _Sent(moved, self._stream.record_event())

    def received(self, item: Any) -> Any:
        """The batch, to be used on the current stream."""
        if not isinstance(item, _Sent):
            return item
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(item.arrival)
        for tensor in _tensors(item.batch):
            tensor.record_stream(stream)
        return item.batch


def mapped(function: Callable[[Any], Any], batch: Any) -> Any:
    """The batch with `function` of all that has a method `to` in it: tensors, and classes that hold some."""
    if hasattr(batch, "to"):
        return function(batch)
    if isinstance(batch, dict):
        return {key: mapped(function, value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(function, value) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(mapped(function, value) for value in batch)
    return batch


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    """All tensors in a batch, and in the attributes of objects that have moved themselves."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, dict | list | tuple):
        for value in batch.values() if isinstance(batch, dict) else batch:
            yield from _tensors(value)
    elif hasattr(batch, "to"):
        yield from _tensors(vars(batch))


def _pinned(value: Any) -> Any:
    is_pinnable = not isinstance(value, torch.Tensor) or value.device.type == "cpu"
    return value.pin_memory() if is_pinnable and hasattr(value, "pin_memory") else value
