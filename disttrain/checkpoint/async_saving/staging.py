"""Staging: copies the values of a state at one moment to memory that training does not change.

GPUs copy on a side stream, after the work that was queued before and concurrently with the work that follows. The next
write to the tensors must wait for the copies, on the GPU and not on the host. The given optimizers wait in their next
step. Tensors that they don't own are copied first, and the current stream waits for these at once.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from disttrain.checkpoint.async_saving.shared_memory import SharedMemory
from disttrain.checkpoint.format.image import Extent, Image
from disttrain.checkpoint.saving.writer import Item
from disttrain.dtensor import DTensor

_SMALL_ELEMENTS = 1 << 15
"""Of larger tensors each copy is worth a call, and several threads."""

_SPARE_BYTES = 2 << 30
"""Memory of a GPU that a copy on it must leave free."""


class Gates:
    """Events on the GPU that optimizers wait for before their next step."""

    def __init__(self) -> None:
        self._events: weakref.WeakKeyDictionary[Optimizer, list[torch.cuda.Event]] = weakref.WeakKeyDictionary()

    def close_until(self, optimizers: Iterable[Optimizer], events: Sequence[torch.cuda.Event]) -> None:
        for optimizer in optimizers:
            if optimizer not in self._events:
                self._events[optimizer] = []
                optimizer.register_step_pre_hook(self._wait)
            self._events[optimizer].extend(events)

    def _wait(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        events = self._events.get(optimizer, [])
        for event in events:
            event.wait()
        events.clear()


class Stager:
    """Copies from this process's tensors."""

    def __init__(self) -> None:
        self._gates = Gates()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def stage(
        self, items: Sequence[Item], image: Image, shared_memory: SharedMemory, optimizers: Sequence[Optimizer]
    ) -> list[torch.cuda.Event]:
        """Begins to copy `items` to their places in the shared memory. Returns: what has happened when all are there.

        Those on the CPU are there on return.
        """
        shared_memory.bytes[: len(image.header)].copy_(torch.frombuffer(bytearray(image.header), dtype=torch.uint8))
        owned = _owned_storages(optimizers)
        by_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        last: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for item, extent in _not_packed(items, image.extents, shared_memory):
            pair = (_target(shared_memory, extent.offset, item.tensor), item.tensor.detach())
            queue = last if item.tensor.untyped_storage().data_ptr() in owned else by_device
            queue.setdefault(item.tensor.device, []).append(pair)
        events = []
        for device in {*by_device, *last}:
            if device.type == "cuda":
                events.append(
                    self._copy_on_side_stream(device, by_device.get(device, []), last.get(device, []), optimizers)
                )
            else:
                for target, source in (*by_device.get(device, []), *last.get(device, [])):
                    target.copy_(source)
        return events

    def _copy_on_side_stream(
        self,
        device: torch.device,
        others: Sequence[tuple[torch.Tensor, torch.Tensor]],
        owned: Sequence[tuple[torch.Tensor, torch.Tensor]],
        optimizers: Sequence[Optimizer],
    ) -> torch.cuda.Event:
        current = torch.cuda.current_stream(device)
        stream = self._streams.get(device) or self._streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(current)
        for queue in (others, owned):
            with torch.cuda.stream(stream):
                for target, source in queue:
                    target.copy_(source, non_blocking=True)
                    source.record_stream(stream)
            if queue is others and others:
                current.wait_stream(stream)
        done = torch.cuda.Event()
        done.record(stream)
        self._gates.close_until(optimizers, [done])
        return done


def can_copy_on_device(items: Sequence[Item]) -> bool:
    """True if the GPUs have room for copies of these items, with some to spare."""
    needed: dict[torch.device, int] = {}
    for item in items:
        if item.tensor.device.type == "cuda":
            needed[item.tensor.device] = needed.get(item.tensor.device, 0) + item.num_bytes
    return bool(needed) and all(
        torch.cuda.mem_get_info(device)[0] > num_bytes + _SPARE_BYTES for device, num_bytes in needed.items()
    )


def copied(items: Sequence[Item]) -> list[Item]:
    """The same items with tensors of their own, on their devices, in the order of the current stream."""
    return [Item(item.name, item.box, item.tensor.detach().clone(), item.kind) for item in items]


def _not_packed(
    items: Sequence[Item], extents: Sequence[Extent], shared_memory: SharedMemory
) -> Iterator[tuple[Item, Extent]]:
    """Copy small tensors on the CPU, many with one call: the image has no gaps. Returns: the others."""
    for dtype, run in itertools.groupby(zip(items, extents, strict=True), key=lambda pair: _packing_dtype(pair[0])):
        if dtype is None:
            yield from run
            continue
        packed = list(run)
        begin, last = packed[0][1].offset, packed[-1][1]
        region = shared_memory.bytes[begin : last.offset + last.num_bytes].view(dtype)
        with torch.no_grad():
            torch.cat([item.tensor.reshape(-1) for item, _ in packed], out=region)


def _packing_dtype(item: Item) -> torch.dtype | None:
    """The dtype of what may be packed; None for what is large, elsewhere or not just its bytes."""
    tensor = item.tensor
    is_plain = tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return tensor.dtype if is_plain and tensor.numel() <= _SMALL_ELEMENTS else None


def _target(shared_memory: SharedMemory, offset: int, source: torch.Tensor) -> torch.Tensor:
    """The part of the shared memory that a tensor goes to: its dtype and shape at `offset`."""
    return shared_memory.bytes[offset : offset + source.numel() * source.itemsize].view(source.dtype).view(source.shape)


def _owned_storages(optimizers: Iterable[Optimizer]) -> set[int]:
    """The memory that only the steps of these optimizers write to."""
    tensors = [
        tensor
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        for tensor in (parameter, *optimizer.state.get(parameter, {}).values())
        if isinstance(tensor, torch.Tensor)
    ]
    with torch.no_grad():
        locals_ = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return {tensor.untyped_storage().data_ptr() for tensor in locals_ if tensor.device.type == "cuda"}
