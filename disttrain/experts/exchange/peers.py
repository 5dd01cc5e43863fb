"""Rows between GPUs of one host: each rank writes into the others' memory, at places that it computes on its device.

The host knows no sizes, so that a step can be captured. The memory has a fixed size, as in `padded.py`, but only rows
that are there are sent, and they come sorted. It has two halves, which take turns: with one barrier on the stream after
the writing, whoever has come to the next barrier has read what came before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch

from disttrain.errors import BackendError
from disttrain.experts.exchange.base import NAME
from disttrain.experts.exchange.blocks import Blocks, Paths, paths_of
from disttrain.experts.exchange.expert_cut import ExpertCut
from disttrain.experts.exchange.padded import FixedRoom
from disttrain.experts.exchange.sizes import counts_of, launches, triton_kernels
from disttrain.kernels.grouped.rows import ExpertOrder
from disttrain.process_group import ProcessGroup
from disttrain.process_group.door import issue
from disttrain.process_group.peers.memory import share_memory

_ALIGNMENT: Final = 256


class RowMemory(Protocol):
    """So many bytes on each rank, which all ranks can address."""

    def of(self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset_bytes: int) -> torch.Tensor: ...

    def barrier(self, timeout_s: float) -> None:
        """Let the current stream go on when all ranks' streams have come here."""
        ...


class Peers(FixedRoom):
    """Writes to the other ranks' memory.

    Args: most_rows  as of `Padded`;  make_memory  a collective that gives memory of so many bytes, None where ranks
                     cannot reach each other's.
    """

    def __init__(
        self,
        group: ProcessGroup,
        most_rows: int | None = None,
        make_memory: Callable[[ProcessGroup, torch.device, int], RowMemory | None] = share_memory,
    ) -> None:
        super().__init__(group, most_rows)
        self._make_memory = make_memory
        self._memory: RowMemory | None = None
        self._half_bytes = 0
        self._half = 0
        self._arriving: _Arriving | None = None
        self._read: torch.cuda.Event | None = None
        self._addresses: list[torch.Tensor] = []

    def route(
        self,
        x: torch.Tensor,
        order: ExpertOrder,
        num_experts: int,
        weights: torch.Tensor | None,
        most_rows: int,
        asked: int = 0,
    ) -> PeerRoute:
        """Exchange the sizes; see `Exchange`."""
        room = self.room(most_rows, x)
        return PeerRoute(self, order, ExpertCut.of(num_experts, self.group.group_size), room)

    def share(self, counts: torch.Tensor) -> torch.Tensor:
        """All ranks' counts (ranks, *counts.shape), of one shape on all."""
        size, rank = self.group.group_size, self.group.group_rank
        all_counts = counts.new_empty((size, *counts.shape))

        def run(output: torch.Tensor, input: torch.Tensor) -> _Done:
            offset = self._begin(output.nbytes, input.device)
            memory = self._made
            # A captured step may have an odd number of exchanges: after this the halves may be in any order.
            memory.barrier(self.group.timeout_s)
            for target in range(size):
                memory.of(target, output.shape, output.dtype, offset)[rank].copy_(input)
            memory.barrier(self.group.timeout_s)
            output.copy_(memory.of(rank, output.shape, output.dtype, offset))
            self._end(input.device)
            return _Done()

        issue(self.group, "all_gather_into_tensor", run, (all_counts, counts), (counts,), (all_counts,), async_op=False)
        return all_counts

    def push(
        self, rows: torch.Tensor, blocks: Blocks, coming: torch.Tensor, num_coming: torch.Tensor, *, async_op: bool
    ) -> Any:
        """Begin to write rows to where their blocks go.

        Args: coming  is filled with what comes to this rank, `num_coming` () rows, once the result is waited for.
        """
        room_bytes = self.group.group_size * self.checked_room * rows.shape[1] * rows.element_size()

        def run(output: torch.Tensor, input: torch.Tensor) -> _Arriving:
            offset = self._begin(room_bytes, input.device)
            self._write(input, blocks, offset)
            self._arriving = arriving = _Arriving(self, output, num_coming, offset)
            return arriving

        return issue(self.group, "all_to_all_single", run, (coming, rows), (rows,), (coming,), async_op)

    def read(self, coming: torch.Tensor, num_coming: torch.Tensor, offset: int) -> None:
        """Copy what has come, once all ranks have written it."""
        memory, rank = self._made, self.group.group_rank
        memory.barrier(self.group.timeout_s)
        source = memory.of(rank, coming.shape, coming.dtype, offset)
        if launches(coming):
            triton_kernels().copy_rows(source, coming, num_coming)
        else:
            count = int(num_coming)
            coming[:count] = source[:count]
        self._arriving = None
        self._end(coming.device)

    @property
    def _made(self) -> RowMemory:
        assert self._memory is not None
        return self._memory

    def _begin(self, num_bytes: int, device: torch.device) -> int:
        """Where in memory the next exchange of so many bytes on each rank has its place."""
        if self._arriving is not None:
            # It is not read yet, and its half comes next but one: all ranks read it now.
            self._arriving.wait()
        self._grow(num_bytes, device)
        if self._read is not None and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(device).wait_event(self._read)
        self._half = 1 - self._half
        return self._half * self._half_bytes

    def _end(self, device: torch.device) -> None:
        """The exchange is over on the current stream; the next one, perhaps on another, comes behind it."""
        # No event may be waited for on both sides of a recording, whose streams are in the order of its replays.
        self._read = None
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            self._read = torch.cuda.Event()
            self._read.record(torch.cuda.current_stream(device))

    def _grow(self, num_bytes: int, device: torch.device) -> None:
        """Make room. All ranks need the same, so that all come here together."""
        if num_bytes <= self._half_bytes:
            return
        half_bytes = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if device.type == "cuda":
            # Others may still write to the old memory: it goes once all have made the new one.
            torch.cuda.synchronize(device)
        memory = self._make_memory(self.group, device, 2 * half_bytes)
        if memory is None:
            raise BackendError(
                NAME,
                "the ranks of the axis cannot write to each other's memory: they are on several hosts, or on CPUs, or "
                "their GPUs are not linked.",
                "Choose exchange='padded', or 'all_to_all'.",
                rank=self.group.world.rank,
            )
        self._memory, self._half_bytes = memory, half_bytes
        ranks = range(self.group.group_size)
        halves = [
            [memory.of(rank, (1,), torch.uint8, half * half_bytes).data_ptr() for rank in ranks] for half in (0, 1)
        ]
        self._addresses = [torch.tensor(addresses, device=device) for addresses in halves]

    def _write(self, rows: torch.Tensor, blocks: Blocks, offset: int) -> None:
        if launches(rows):
            triton_kernels().push_rows(rows.contiguous(), *blocks, self._addresses[offset > 0])
            return
        begin, shape = 0, (self.group.group_size * self.checked_room, rows.shape[1])
        for end, target, first in zip(*(numbers.tolist() for numbers in blocks), strict=True):
            if end > begin:
                there = self._made.of(target, shape, rows.dtype, offset)
                there[first : first + end - begin] = rows[begin:end]
            begin = end


class PeerRoute:
    """A Route whose rows are written to where they belong."""

    def __init__(self, owner: Peers, order: ExpertOrder, cut: ExpertCut, room: int) -> None:
        self._owner = owner
        self._num_home = len(order.order)
        self._most_come = owner.group.group_size * room
        counts = counts_of(order.ends, cut).reshape(-1).to(torch.int32)
        self._paths: Paths = paths_of(owner.share(counts), cut, owner.group.group_rank)
        self.ends = self._paths.ends

    def agreed(self, asked: int) -> int:
        return asked

    def start(self, rows: torch.Tensor, is_back: bool, *, async_op: bool = True) -> tuple[torch.Tensor, Any]:
        there, back, _ = self._paths
        blocks, num_coming = (back, there.ends[-1]) if is_back else (there, back.ends[-1])
        coming = rows.new_empty((self._num_home if is_back else self._most_come, rows.shape[1]))
        return coming, self._owner.push(rows, blocks, coming, num_coming, async_op=async_op)

    def finish(self, coming: torch.Tensor, work: Any, is_back: bool) -> torch.Tensor:
        if work is not None:
            work.wait()
        return coming


class _Arriving:
    """A TransportWork: rows that the ranks write, and that this one has not read."""

    def __init__(self, owner: Peers, coming: torch.Tensor, num_coming: torch.Tensor, offset: int) -> None:
        self._owner: Peers | None = owner
        self._what = (coming, num_coming, offset)

    def wait(self, timeout: Any = None) -> bool:
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.read(*self._what)
        return True

    def is_completed(self) -> bool:
        return self._owner is None

    def get_future(self) -> torch.futures.Future[Any]:
        return _Done().get_future()


class _Done:
    """A TransportWork that streams have in their order already."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(None)
        return done
