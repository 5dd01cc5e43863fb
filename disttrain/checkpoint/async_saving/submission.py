"""Brings one save from tensors to its writer: the caller, who must not wait, begins it, and a thread that may wait ends
it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch.optim import Optimizer

from disttrain.checkpoint.async_saving.job import Job
from disttrain.checkpoint.async_saving.pending import PendingSave
from disttrain.checkpoint.async_saving.session import Session
from disttrain.checkpoint.async_saving.shared_memory import SharedMemory
from disttrain.checkpoint.async_saving.staging import Stager, can_copy_on_device, copied
from disttrain.checkpoint.format.image import Image
from disttrain.checkpoint.saving.copies_compared import Replicas
from disttrain.checkpoint.saving.digests import Digests
from disttrain.checkpoint.saving.writer import Item
from disttrain.errors import CheckpointError, DisttrainError


@dataclass
class Slot:
    """Room for one save; `pending` is the last one that had it."""

    shared_memory: SharedMemory | None = None
    pending: PendingSave | None = None

    @property
    def is_free(self) -> bool:
        return self.pending is None or self.pending.done()


@dataclass
class Submission:
    """One save's way into shared memory: begun by the caller, ended by a thread that may wait. `shared`: of which plain
    tensors, by groups of ranks, the digests go with it."""

    stager: Stager
    session: Session
    pending: PendingSave
    slot: Slot
    items: list[Item]
    image: Image | None
    job: Job
    shared: Sequence[tuple[int, Sequence[str]]]
    digests: Digests
    copies: list[Item] | None = None

    def __post_init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        """Copies the values, or queues the copies, so that the host and the current stream may go on."""
        assert self.image is not None
        has_room = self.slot.shared_memory is not None and self.slot.shared_memory.num_bytes >= self.image.num_bytes
        if not has_room and can_copy_on_device(self.items):
            # Pinning memory takes seconds. Copies on the GPU take milliseconds, and training waits only for these.
            self.copies = copied(self.items)
            self._events = [_recorded(device) for device in _gpus(self.items)]
            return
        if not has_room:
            self._make_shared_memory()
        assert self.slot.shared_memory is not None
        self._events = self.stager.stage(self.items, self.image, self.slot.shared_memory, optimizers)

    def finish(self) -> None:
        """Wait for the copies, and hand them to the writer."""
        try:
            if self.copies is not None:
                self._stage_copies(self.copies)
            for event in self._events:
                event.synchronize()
            digests = self.digests.read()
        except Exception as error:  # noqa: BLE001  all ranks must hear of it
            self.session.refuse(self.job.number, as_ours(error))
            return
        self.copies = None
        self.items.clear()
        self.pending.mark_staged()
        copies = [Replicas(number, names, [digests.get(name, b"") for name in names]) for number, names in self.shared]
        self.session.submit(replace(self.job, copies=copies), self.slot.shared_memory)

    def _make_shared_memory(self) -> None:
        assert self.image is not None
        self.slot.shared_memory = None  # the old one goes first
        self.slot.shared_memory = SharedMemory(self.image.num_bytes, is_pinned=bool(_gpus(self.items)))

    def _stage_copies(self, copies: list[Item]) -> None:
        with ExitStack() as streams:
            for event, device in zip(self._events, _gpus(copies), strict=True):
                # A stream of this thread's own: that of the training must not wait.
                stream = torch.cuda.Stream(device)
                stream.wait_event(event)
                streams.enter_context(torch.cuda.stream(stream))
            self._make_shared_memory()
            assert self.image is not None
            assert self.slot.shared_memory is not None
            self._events = self.stager.stage(copies, self.image, self.slot.shared_memory, ())


def _gpus(items: Sequence[Item]) -> list[torch.device]:
    devices = {item.tensor.device for item in items if item.tensor.device.type == "cuda"}
    return sorted(devices, key=str)


def _recorded(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def as_ours(error: Exception) -> DisttrainError:
    """An error in words for all ranks."""
    if isinstance(error, DisttrainError):
        return error
    return CheckpointError("async_save", f"{type(error).__name__}: {error}.")
