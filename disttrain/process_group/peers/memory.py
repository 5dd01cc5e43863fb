"""Exchanges between GPUs of one host by their copy engines, which leave all cores to what is computed meanwhile.

NCCL's kernels need cores of the GPU, and a matrix product takes them all: launched together, one waits for the other.
Each rank has a piece of memory that the others can address, and write to. Two halves of it take turns, so that barriers
on the stream after the writing are enough: whoever has come to the next one has finished with the last.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from disttrain.process_group._c10d import SharedMemory
from disttrain.process_group.calls.objects import all_gather_object
from disttrain.process_group.door import issue
from disttrain.process_group.group import ProcessGroup
from disttrain.settings import NCCL_HOSTID
from disttrain.store import PrefixStore

Wait = Callable[[], None]
"""Order the current stream after something."""

_SMALLEST_HALF_BYTES = 64 << 20
_ALIGNMENT = 256
_MOST_PIECES = 64
"""To launch more copies takes longer than a kernel that makes them all."""


class PeerMemory:
    """GPU memory that a group shares. Calls are collective and come in one order on all ranks; streams may differ."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._memory: SharedMemory | None = None
        self._half_bytes = 0
        self._num_made = 0
        self._half = 0
        self._copies = torch.cuda.Stream(device, priority=-1)
        self._ended: torch.cuda.Event | None = None

    def grow(self, half_bytes: int) -> None:
        """Make room for exchanges of so many bytes; waits for what is under way. Collective where there is none yet."""
        if half_bytes <= self._half_bytes:
            return
        # Others may be copying from the old memory: it goes when all have come to make the new one.
        torch.cuda.synchronize(self._device)
        self._num_made += 1
        half_bytes = max(_SMALLEST_HALF_BYTES, -(-half_bytes // _ALIGNMENT) * _ALIGNMENT)
        group = self._group
        store = PrefixStore(f"peer_memory/{group.group_name}/{self._num_made}", group.world.store)
        name = f"disttrain/{group.group_name}/{self._num_made}"
        self._memory = SharedMemory(name, group.group_rank, group.group_size, store, 2 * half_bytes, self._device)
        self._half_bytes = half_bytes

    def gather(self, part: torch.Tensor, parts: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Copy all ranks' contiguous tensors like `part` to `parts` (group_size, *part.shape).

        `parts` may have gaps along its first dim.

        Yields each rank with its part, once the current stream is ordered after it: this rank's first, the nearest
        before it next. The parts stay until the loop is over; `parts` is filled then, and `part` may change.
        """
        group, rank, size = self._group, self._group.group_rank, self._group.group_size
        device, shape = self._device, (size, *part.shape)
        offset = self._begin(size * part.nbytes)
        memory, copies = self._shared, self._copies
        received = memory.of(rank, shape, part.dtype, offset)
        sent: list[torch.cuda.Event] = []

        def run(output: torch.Tensor, input: torch.Tensor) -> OnStream:
            copies.wait_stream(torch.cuda.current_stream(device))
            # Also if what is computed meanwhile fails, and nobody waits.
            input.record_stream(copies)
            output.record_stream(copies)
            with torch.cuda.stream(copies):
                for step in range(1, size):
                    memory.of((rank + step) % size, shape, input.dtype, offset)[rank].copy_(input, non_blocking=True)
                    sent.append(_recorded(copies))
                copy_blocks(output[rank], input)
            return OnStream(_recorded(copies).wait)

        issue(group, "all_gather_into_tensor", run, (parts, part), (part,), (parts,), True)
        yield rank, part
        for step, event in enumerate(sent, 1):
            source, stream = (rank - step) % size, torch.cuda.current_stream(device)
            stream.wait_event(event)
            memory.barrier(group.timeout_s)
            has_come = _recorded(stream)
            yield source, received[source]
            # On the GPU's cores, as copies within its memory are: behind a product, it takes those that this leaves.
            copies.wait_event(has_come)
            with torch.cuda.stream(copies):
                copy_blocks(parts[source], received[source])
        torch.cuda.current_stream(device).wait_stream(copies)
        self.end()

    def sum(self, shape: Sequence[int], dtype: torch.dtype) -> PeerSum:
        """Begin a sum of all ranks' terms of this shape, one for each rank."""
        offset = self._begin(self._group.group_size * math.prod(shape) * dtype.itemsize)
        return PeerSum(self, self._group, self._shared, self._copies, (*shape,), dtype, offset)

    @property
    def _shared(self) -> SharedMemory:
        assert self._memory is not None
        return self._memory

    def _begin(self, num_bytes: int) -> int:
        """The offset in memory of the next exchange of so many bytes, which comes after those before, on any stream."""
        self.grow(num_bytes)
        stream = torch.cuda.current_stream(self._device)
        if self._ended is not None:
            stream.wait_event(self._ended)
        self._half = 1 - self._half
        self._ended = None
        return self._half * self._half_bytes

    def end(self) -> None:
        """An exchange is over on the current stream: one on another stream has to wait for this."""
        self._ended = _recorded(torch.cuda.current_stream(self._device))


class PeerSum:
    """Terms on their way to the ranks that sum them up."""

    def __init__(
        self,
        owner: PeerMemory,
        group: ProcessGroup,
        memory: SharedMemory,
        copies: torch.cuda.Stream,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        offset: int,
    ) -> None:
        self._owner, self._group, self._memory, self._copies = owner, group, memory, copies
        self._shape, self._dtype, self._offset = shape, dtype, offset
        self._terms = memory.of(group.group_rank, (group.group_size, *shape), dtype, offset)
        self._sent: list[torch.Tensor] = []

    def send(self, target: int, term: torch.Tensor) -> None:
        """Begin to copy `term`, which may lie apart along its first dim, to group rank `target`, once the current
        stream has come here."""
        size, rank = self._group.group_size, self._group.group_rank
        self._copies.wait_stream(torch.cuda.current_stream(term.device))
        slot = self._memory.of(target, (size, *self._shape), self._dtype, self._offset)[rank]
        with torch.cuda.stream(self._copies):
            copy_blocks(slot, term)
        term.record_stream(self._copies)
        self._sent.append(term)

    def finish(self, term: torch.Tensor) -> torch.Tensor:
        """This rank's sum, on the current stream. `term` is its own term, which may lie apart along its first dim."""
        group, stream = self._group, torch.cuda.current_stream(self._terms.device)
        total = self._terms.new_empty(self._shape)

        def run(output: torch.Tensor, input: torch.Tensor) -> OnStream:
            stream.wait_stream(self._copies)
            self._memory.barrier(group.timeout_s)
            add_up(input, group.group_rank, term, output)
            return OnStream(_recorded(stream).wait)

        issue(group, "reduce_scatter_tensor", run, (total, self._terms), (self._terms,), (total,), False)
        self._sent.clear()
        self._owner.end()
        return total


def copy_blocks(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy on the current stream, piece by piece along the first dim where that is contiguous and the whole is not: so
    a copy engine can do it, and no kernel has to."""
    if len(target) > _MOST_PIECES or (target.is_contiguous() and source.is_contiguous()):
        target.copy_(source, non_blocking=True)
        return
    for block, other in zip(target, source, strict=True):
        block.copy_(other, non_blocking=True)


def add_up(terms: torch.Tensor, rank: int, term: torch.Tensor, total: torch.Tensor) -> None:
    """total = the sum of `terms` (ranks, *term.shape), of which the one at `rank` is `term`, and not there yet."""
    if len(terms) != 2 or len(term) > _MOST_PIECES:
        copy_blocks(terms[rank], term)
        torch.sum(terms, 0, out=total)
        return
    if term.is_contiguous():
        torch.add(term, terms[1 - rank], out=total)
        return
    # Each block is contiguous: the addition takes several elements at once.
    for block, other, result in zip(term, terms[1 - rank], total, strict=True):
        torch.add(block, other, out=result)


class OnStream:
    """A TransportWork of what streams do: to wait is to order the current one after it."""

    def __init__(self, order: Wait) -> None:
        self._order = order

    def wait(self, timeout: Any = None) -> bool:
        self._order()
        return True

    def is_completed(self) -> bool:
        return False

    def get_future(self) -> torch.futures.Future[Any]:
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(None)
        return done


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


def peer_memory_of(group: ProcessGroup, device: torch.device) -> PeerMemory | None:
    """The memory that the group shares; None where its ranks are on several hosts, or GPUs cannot reach each other.

    Collective when it is asked for the first time.
    """
    if group.peer_memory is None:
        group.peer_memory = (_made(group, device),)
    memory: PeerMemory | None = group.peer_memory[0]
    return memory


def share_memory(group: ProcessGroup, device: torch.device, num_bytes: int) -> SharedMemory | None:
    """So many bytes of GPU memory on each rank of the group, for one user's own order of barriers.

    None where ranks are on several hosts, or GPUs cannot reach each other. Collective.
    """
    if not _are_on_one_host(group, device):
        return None
    # All have called as many collectives, and none has this name twice.
    name = f"{group.group_name}/after/{group.sequence}"
    store = PrefixStore(f"peer_memory/{name}", group.world.store)
    memory, problem = None, ""
    try:
        memory = SharedMemory(f"disttrain/{name}", group.group_rank, group.group_size, store, num_bytes, device)
    except RuntimeError as error:
        problem = str(error)
    return memory if _is_well(group, problem) else None


def _made(group: ProcessGroup, device: torch.device) -> PeerMemory | None:
    if not _are_on_one_host(group, device):
        return None
    memory, problem = PeerMemory(group, device), ""
    try:
        memory.grow(_SMALLEST_HALF_BYTES)
    except RuntimeError as error:
        problem = str(error)
    return memory if _is_well(group, problem) else None


def _are_on_one_host(group: ProcessGroup, device: torch.device) -> bool:
    """True if all ranks have GPUs of one host."""
    hosts: list[Any] = [None] * group.group_size
    all_gather_object(hosts, [NCCL_HOSTID.read() or socket.gethostname(), device.type], group)
    return device.type == "cuda" and all(host == hosts[0] for host in hosts)


def _is_well(group: ProcessGroup, problem: str) -> bool:
    """True if no rank has a problem."""
    problems: list[Any] = [None] * group.group_size
    all_gather_object(problems, problem, group)
    return not any(problems)
