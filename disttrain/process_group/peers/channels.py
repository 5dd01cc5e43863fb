"""Messages between GPUs of one host by copy engines, while all cores compute.

A kernel of NCCL's takes cores from the first moment that it waits for its peer, and a matrix product that finds one of
them taken runs in two turns. Here nothing is launched that waits: the sender's copy engine writes into a slot on the
receiver's GPU, and raises a number on the host that the receiver's stream is told to wait for. Source: CUDA driver
API, "Stream Memory Operations".

The numbers lie in memory that all processes of the host share, so that who waits for a rank that has failed can be let
go: with values that are not numbers, in slots that are filled with them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch

from disttrain.errors import CollectiveTimeoutError
from disttrain.process_group._c10d import SharedMemory
from disttrain.process_group.calls.objects import all_gather_object
from disttrain.process_group.door import issue_message
from disttrain.process_group.group import ProcessGroup
from disttrain.process_group.peers import cuda_driver as _cuda
from disttrain.process_group.work import TransportWork, Work
from disttrain.settings import NCCL_HOSTID
from disttrain.store import PrefixStore

Made = TypeVar("Made")
Pair = tuple[int, int]
"""Group ranks of sender and receiver."""

_ALIGNMENT = 256
_ARRIVED, _CONSUMED = 0, 1
_LOOK_EVERY_S = 1.0
_POISON_S = 1.0
_AGAIN_S = 0.01
_RELEASE_S = 600.0


class PeerChannels:
    """One way from each sender to each receiver of `pairs`, on which tensors keep their order.

    Args: slot_bytes  of the largest tensor that is ever sent;  num_slots  how many a sender may be ahead of what the
          receiver has waited for, after which its next copy waits;  numbers  2 * group_size**2 of them, all 0.
    Collective: every rank of the group, which is on one host (`can_reach`).
    """

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        pairs: Iterable[Pair],
        slot_bytes: int,
        num_slots: int,
        numbers: SharedNumbers,
        name: str,
    ) -> None:
        self._group = group
        self._device = device
        self.slot_bytes = -(-slot_bytes // _ALIGNMENT) * _ALIGNMENT
        self._num_slots = num_slots
        self._senders: dict[int, list[int]] = {}
        for source, target in sorted(set(pairs)):
            self._senders.setdefault(target, []).append(source)
        most = max(map(len, self._senders.values()), default=0)
        name = f"peer_channels/{group.group_name}/{name}"
        store = PrefixStore(name, group.world.store)
        num_bytes = max(_ALIGNMENT, most * num_slots * self.slot_bytes)
        self._memory = SharedMemory(f"disttrain/{name}", group.group_rank, group.group_size, store, num_bytes, device)
        self._numbers = numbers
        self._num_sent: dict[int, int] = {}
        self._num_received: dict[int, int] = {}
        self._num_taken: dict[int, int] = {}
        self._waiting: dict[int, deque[_Receipt]] = {}
        self._copies: dict[int, torch.cuda.Stream] = {}
        group.when_ended(_releasing(self))
        _watch(self)

    def send(self, tensor: torch.Tensor, peer: int) -> Work:
        """Begin to send a contiguous tensor to group rank `peer`. It must not change until the handle is completed."""

        def run(tensor: torch.Tensor, peer: int, _: int) -> _Copied:
            self._group.check()
            number = self._num_sent[peer] = self._num_sent.get(peer, 0) + 1
            copies = self._copies.get(peer) or self._copies.setdefault(peer, torch.cuda.Stream(self._device))
            copies.wait_stream(torch.cuda.current_stream(self._device))
            rank = self._group.group_rank
            if number > self._num_slots:
                _cuda.wait_for_number(copies, self._address(_CONSUMED, rank, peer), number - self._num_slots)
            with torch.cuda.stream(copies):
                self._slot(rank, peer, number, tensor).copy_(tensor, non_blocking=True)
                _cuda.write_number(copies, self._address(_ARRIVED, rank, peer), number)
            return _Copied(tensor, _recorded(copies))

        return issue_message(self._group, "send", run, tensor, peer)

    def receive(self, tensor: torch.Tensor, peer: int) -> Work:
        """The next tensor that group rank `peer` sends, into this contiguous one: not before somebody waits for it."""

        def run(tensor: torch.Tensor, peer: int, _: int) -> _Receipt:
            self._group.check()
            number = self._num_received[peer] = self._num_received.get(peer, 0) + 1
            # Whoever is waited for later may take this one as well, on another stream.
            free = torch.cuda.Event()
            free.record(torch.cuda.current_stream(self._device))
            receipt = _Receipt(self, peer, number, tensor, free)
            self._waiting.setdefault(peer, deque()).append(receipt)
            return receipt

        return issue_message(self._group, "recv", run, tensor, peer)

    def take(self, receipt: _Receipt) -> None:
        """Order the current stream after what it stands for, and after all that came before on the same way."""
        stream = torch.cuda.current_stream(self._device)
        waiting = self._waiting[receipt.peer]
        while receipt.event is None:
            first = waiting.popleft()
            stream.wait_event(first.free)
            _cuda.wait_for_number(stream, self._address(_ARRIVED, first.peer, self._group.group_rank), first.number)
            first.tensor.copy_(self._slot(first.peer, self._group.group_rank, first.number, first.tensor))
            _cuda.write_number(stream, self._address(_CONSUMED, first.peer, self._group.group_rank), first.number)
            self._num_taken[first.peer] = first.number
            first.event = torch.cuda.Event()
            first.event.record(stream)
        stream.wait_event(receipt.event)

    def poison(self) -> torch.cuda.Event:
        """Begin to fill what this rank has received, or will, with what is not a number: the group has ended."""
        stream = torch.cuda.Stream(self._device, priority=-1)
        rank = self._group.group_rank
        with torch.cuda.stream(stream):
            num_bytes = len(self._senders.get(rank, ())) * self._num_slots * self.slot_bytes
            self._memory.of(rank, (num_bytes,), torch.uint8, 0).fill_(0xFF)
        return _recorded(stream)

    def release(self) -> None:
        """Let all go on that wait on this rank's streams."""
        rank = self._group.group_rank
        for other in range(self._group.group_size):
            self._numbers.raise_to_most(self._index(_ARRIVED, other, rank))
            self._numbers.raise_to_most(self._index(_CONSUMED, rank, other))

    def _slot(self, source: int, target: int, number: int, like: torch.Tensor) -> torch.Tensor:
        index = self._senders[target].index(source) * self._num_slots + number % self._num_slots
        assert like.nbytes <= self.slot_bytes
        return self._memory.of(target, like.shape, like.dtype, index * self.slot_bytes)

    def _index(self, kind: int, source: int, target: int) -> int:
        return (source * self._group.group_size + target) * 2 + kind

    def _address(self, kind: int, source: int, target: int) -> int:
        return self._numbers.address(self._index(kind, source, target))

    def missing(self) -> list[int]:
        """Group ranks whose messages, or whose room for more of ours, this rank's streams wait for, or will."""
        rank, room = self._group.group_rank, self._num_slots
        late = [
            peer
            for peer, taken in self._num_taken.copy().items()
            if self._numbers[self._index(_ARRIVED, peer, rank)] < taken
        ]
        full = [
            peer
            for peer, sent in self._num_sent.copy().items()
            if self._numbers[self._index(_CONSUMED, rank, peer)] < sent - room
        ]
        return sorted({*late, *full})

    def progress(self) -> list[int]:
        """Counts the messages that have come from each rank, and then those that each rank has taken."""
        rank, ranks = self._group.group_rank, range(self._group.group_size)
        arrived = [self._numbers[self._index(_ARRIVED, peer, rank)] for peer in ranks]
        return arrived + [self._numbers[self._index(_CONSUMED, rank, peer)] for peer in ranks]


class SharedNumbers:
    """32-bit numbers that all processes of one host, and their GPUs, can read and write: those in the file at `path`.

    Raises: OSError, RuntimeError.
    """

    LINE_BYTES = 64
    """Two numbers that different GPUs write don't lie in one cache line."""
    MOST = 0x7FFFFFFF

    @classmethod
    def make_file(cls, count: int) -> str:
        """A file for so many, for its owner's eyes only; to be removed once all have it open."""
        handle, path = tempfile.mkstemp(prefix="disttrain-", dir=_memory_folder())
        os.ftruncate(handle, -(-count * cls.LINE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE)
        os.close(handle)
        return path

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        num_bytes = len(self._memory)
        self._numbers = (ctypes.c_uint32 * (num_bytes // 4)).from_buffer(self._memory)
        self._start = ctypes.addressof(self._numbers)
        _cuda.show_to_devices(self._start, num_bytes)
        weakref.finalize(self, _cuda.hide_from_devices, self._start)

    def address(self, index: int) -> int:
        """The address of a number, for the host and for GPUs."""
        return self._start + index * self.LINE_BYTES

    def __getitem__(self, index: int) -> int:
        return self._numbers[index * self.LINE_BYTES // 4]

    def raise_to_most(self, index: int) -> None:
        """Whatever waits for this number goes on."""
        self._numbers[index * self.LINE_BYTES // 4] = self.MOST


class _Copied:
    """A TransportWork: a copy that has been handed to a copy engine."""

    def __init__(self, tensor: torch.Tensor, done: torch.cuda.Event) -> None:
        self._tensor = tensor
        self._done = done

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._done.wait()
        return True

    def is_completed(self) -> bool:
        return bool(self._done.query())

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return _future_of(self, self._tensor)


class _Receipt:
    """A TransportWork: a message that has not been asked for, or has."""

    def __init__(
        self, channels: PeerChannels, peer: int, number: int, tensor: torch.Tensor, free: torch.cuda.Event
    ) -> None:
        self.free = free
        """From when on the tensor may be written to."""
        self.peer = peer
        self.number = number
        self.tensor = tensor
        self.event: torch.cuda.Event | None = None
        self._channels = channels

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._channels.take(self)
        return True

    def is_completed(self) -> bool:
        return self.event is not None and self.event.query()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return _future_of(self, self.tensor)


def _future_of(work: TransportWork, tensor: torch.Tensor) -> torch.futures.Future[list[torch.Tensor]]:
    """A future whose waits and callbacks come after the message on the device; the current stream does not wait."""
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=[tensor.device])
    stream = torch.cuda.Stream(tensor.device)
    with torch.cuda.stream(stream):
        work.wait()
        tensor.record_stream(stream)
        future.set_result([tensor])
    return future


def _releasing(channels: PeerChannels) -> Callable[[], None]:
    weak = weakref.ref(channels)

    def release() -> None:
        alive = weak()
        if alive is None:
            return
        poisoned, begun_s = alive.poison(), time.monotonic()
        # The fill may stand behind what waits, where streams share a queue of the device's.
        while not poisoned.query() and time.monotonic() - begun_s < _POISON_S:
            time.sleep(_AGAIN_S)
        # Again and again: a sender's device may still write the numbers that its host has asked for before it failed.
        while alive is not None and time.monotonic() - begun_s < _RELEASE_S:
            alive.release()
            del alive
            time.sleep(_AGAIN_S)
            alive = weak()

    return release


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


def _memory_folder() -> str | None:
    folder = "/dev/shm"  # noqa: S108 -- mkstemp makes a file there that is this user's alone
    return folder if os.path.isdir(folder) else None


def _watch(channels: PeerChannels) -> None:
    """End the group when messages that this rank waits for do not come, nor anything else, within its timeout."""
    weak, group = weakref.ref(channels), channels._group

    def look() -> None:
        seen: list[int] = []
        since_s = time.monotonic()
        while True:
            time.sleep(_LOOK_EVERY_S)
            alive = weak()
            if alive is None or group.ended_by:
                return
            now, missing = alive.progress(), alive.missing()
            del alive
            if now != seen or not missing:
                seen, since_s = now, time.monotonic()
            elif time.monotonic() - since_s > group.timeout_s:
                ranks = ", ".join(str(group.members[peer]) for peer in missing)
                error = CollectiveTimeoutError(
                    "recv",
                    f"nothing has come from rank {ranks}, nor been taken there, within {group.timeout_s:g} s.",
                    "Look for a rank that died, hangs, or takes another branch.",
                    rank=group.world.rank,
                )
                group.give_up("recv", error)
                return

    threading.Thread(target=look, name="disttrain peer channels", daemon=True).start()


def open_channels(
    group: ProcessGroup, device: torch.device, pairs: Iterable[Pair], slot_bytes: int, num_slots: int
) -> PeerChannels | None:
    """`PeerChannels` for a group, of the largest sizes that one of its ranks asks for; None where its ranks are on
    several hosts, or their GPUs cannot reach each other. Collective: every rank of the group.

    Each step that may fail on one rank alone is followed by an exchange, so that all go on, or none.
    """
    path, problem = "", ""
    if group.group_rank == 0 and device.type == "cuda":
        made, problem = _attempt(lambda: SharedNumbers.make_file(2 * group.group_size**2))
        path = made or ""
    try:
        wishes = _gathered(group, [_host(), device.type, slot_bytes, num_slots, path, problem])
        if device.type != "cuda" or any(wish[0] != wishes[0][0] or wish[5] for wish in wishes):
            return None
        numbers, problem = _attempt(lambda: SharedNumbers(wishes[0][4]))
        if any(_gathered(group, problem)) or numbers is None:
            return None
    finally:
        if path:
            os.unlink(path)
    most_bytes, most_slots = (max(wish[field] for wish in wishes) for field in (2, 3))
    # What the slots need does not come out of the cache.
    torch.cuda.empty_cache()
    name = os.path.basename(wishes[0][4])
    channels, problem = _attempt(lambda: PeerChannels(group, device, pairs, most_bytes, most_slots, numbers, name))
    return None if any(_gathered(group, problem)) else channels


def _gathered(group: ProcessGroup, value: Any) -> list[Any]:
    values: list[Any] = [None] * group.group_size
    all_gather_object(values, value, group)
    return values


def _attempt(make: Callable[[], Made]) -> tuple[Made | None, str]:
    """The result of `make` and an empty text, or None and the reason of its failure."""
    try:
        return make(), ""
    except (RuntimeError, OSError) as error:
        return None, f"{type(error).__name__}: {error}"


def _host() -> str:
    """Alike for processes that share memory: one kernel, one folder for it, and nobody who tells NCCL otherwise."""
    folder = _memory_folder()
    kernel = Path("/proc/sys/kernel/random/boot_id")
    name = kernel.read_text() if kernel.exists() else socket.gethostname()
    return f"{NCCL_HOSTID.read() or ''} {name} {os.stat(folder).st_dev if folder else ''}"
