"""Sends keys round a ring by copy engines, between GPUs of one host: NCCL's kernels would take cores from attention.

Each rank has memory that the others write to: two slots for keys, and two for terms of gradients, which take turns. A
barrier on the stream that computes, where it needs what comes, says that all has come. Who has come to it has also read
what came before, so that the other slot is free: its sender may write to it while all compute. Nothing is counted from
one run of a ring to the next, since a recorded step is replayed without the host: each run begins with a barrier, and
with the same slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch

from disttrain.process_group import ProcessGroup, Work
from disttrain.process_group.door import issue_message
from disttrain.process_group.peers.memory import OnStream, share_memory

_ALIGNMENT: Final = 256
_SMALLEST_SLOT_BYTES: Final = 4 << 20
KEYS, TERMS = range(2)
_NUM_TURNS: Final = 2


class Memory(Protocol):
    """So many bytes on each rank, which all ranks can address."""

    def of(self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset_bytes: int) -> torch.Tensor: ...

    def barrier(self, timeout_s: float) -> None:
        """Lets the current stream go on when all ranks' streams have come here."""
        ...


MakeMemory = Callable[[ProcessGroup, torch.device, int], Memory | None]


class PeerSlots:
    """The memory of a group on one device. Calls come in one order on all ranks.

    Args: make_memory  a collective that gives memory of so many bytes, None where ranks cannot reach each other's.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, make_memory: MakeMemory = share_memory) -> None:
        self._group = group
        self.device = device
        self._make_memory = make_memory
        self._memory: Memory | None = None
        self._recorded: list[Memory] = []
        """What recorded steps write to, also when they are replayed after this has grown."""
        self._is_reachable = True
        self._slot_bytes = 0
        self._turns = [0, 0]
        self._last_stream: Any = None
        self._copies = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def begin(self, message_bytes: int) -> bool:
        """Begins a run whose messages have so many bytes at most, on all ranks; False where it cannot be had.

        Collective where there is no room for these yet. All ranks know the same, and decide alike.
        """
        is_recorded = self._copies is not None and torch.cuda.is_current_stream_capturing()
        if message_bytes > self._slot_bytes and not is_recorded:
            self._grow(message_bytes)
        if message_bytes > self._slot_bytes:
            return False
        if self._copies is not None and not is_recorded:
            stream = torch.cuda.current_stream(self.device)
            if self._last_stream not in (None, stream):
                stream.wait_stream(self._last_stream)
            self._last_stream = stream
        if is_recorded and self._memory is not None and self._memory not in self._recorded:
            self._recorded.append(self._memory)
        self._barrier()
        self._turns = [0, 0]
        return True

    def start(
        self,
        kind: int,
        outgoing: Sequence[tuple[int, torch.Tensor]],
        incoming: Sequence[tuple[int, int]],
        dtype: torch.dtype,
    ) -> tuple[Sequence[Work], Mapping[int, torch.Tensor], Callable[[], object]]:
        """Begins an exchange of KEYS or TERMS, of one message from a rank and one to a rank at most.

        All ranks call it, also those that neither send nor receive.

        Args:    incoming  ranks of the group, with the numbers of elements that come from them.
        Returns: handles; what comes, once the last is called, which all ranks do; it stays until the next but one.
        """
        offset = (_NUM_TURNS * kind + self._turns[kind]) * self._slot_bytes
        self._turns[kind] = 1 - self._turns[kind]
        arrival = _Arrival(self._barrier)
        works = []

        def send(message: torch.Tensor, target: int, _: int) -> _Arrival:
            arrival.is_sent = self._write(message, target, offset)
            return arrival

        for target, message in outgoing:
            works.append(issue_message(self._group, "send", send, message, target))
        coming = {source: self._slot(self._group.group_rank, size, dtype, offset) for source, size in incoming}
        for source, message in coming.items():
            works.append(issue_message(self._group, "recv", lambda *_: arrival, message, source))
        return works, coming, arrival.wait

    def _write(self, message: torch.Tensor, target: int, offset: int) -> Callable[[], None] | None:
        """Copies a message to the memory of a rank, and returns what orders the current stream after that."""
        slot = self._slot(target, message.numel(), message.dtype, offset)
        copies = self._copies
        if copies is None:
            slot.copy_(message)
            return None
        copies.wait_stream(torch.cuda.current_stream(self.device))
        # Also where what is computed meanwhile fails, and nobody waits.
        message.record_stream(copies)
        with torch.cuda.stream(copies):
            slot.copy_(message, non_blocking=True)
        sent = torch.cuda.Event()
        sent.record(copies)
        return sent.wait

    def _slot(self, rank: int, size: int, dtype: torch.dtype, offset: int) -> torch.Tensor:
        assert self._memory is not None
        return self._memory.of(rank, (size,), dtype, offset)

    def _barrier(self) -> None:
        assert self._memory is not None
        self._memory.barrier(self._group.timeout_s)

    def _grow(self, message_bytes: int) -> None:
        if not self._is_reachable:
            return
        slot_bytes = max(_SMALLEST_SLOT_BYTES, -(-message_bytes // _ALIGNMENT) * _ALIGNMENT)
        if self._copies is not None:
            # Others may still write to the old memory: it goes once all have made the new one.
            torch.cuda.synchronize(self.device)
        memory = self._make_memory(self._group, self.device, 2 * _NUM_TURNS * slot_bytes)
        if memory is None:
            self._is_reachable = False
        else:
            self._memory, self._slot_bytes = memory, slot_bytes


class _Arrival(OnStream):
    """A TransportWork: all messages of one exchange, which are there behind one barrier."""

    def __init__(self, barrier: Callable[[], None]) -> None:
        super().__init__(self._order_once)
        self._barrier: Callable[[], None] | None = barrier
        self.is_sent: Callable[[], None] | None = None

    def _order_once(self) -> None:
        barrier, self._barrier = self._barrier, None
        if barrier is None:
            return
        if self.is_sent is not None:
            self.is_sent()
        barrier()


def slots_for(group: ProcessGroup, device: torch.device, message_bytes: int) -> PeerSlots | None:
    """The group's slots, with a run begun (`PeerSlots.begin`); None where messages go by the group's transport."""
    slots: PeerSlots | None = group.peer_slots
    if slots is None and device.type == "cuda" and message_bytes:
        slots = group.peer_slots = PeerSlots(group, device)
    is_served = slots is not None and slots.device == device and message_bytes > 0
    return slots if is_served and slots is not None and slots.begin(message_bytes) else None
