"""Ranks as threads of one process, for tests, teaching and simulation. A deadlock is reported, not waited out.

Every operation is a meeting that its members join; whoever comes last does the work for all. The `Fabric` knows all
threads, so it sees when each one that still runs waits for a meeting that nobody is left to complete.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch

from disttrain.errors import BackendError, CollectiveMismatchError, CollectiveTimeoutError
from disttrain.process_group._c10d import ReduceOp, Reduction
from disttrain.process_group.backends.base import Backend, Membership
from disttrain.process_group.work import TransportWork

Payload = TypeVar("Payload")
Combine = Callable[[Sequence[Payload]], None]


@dataclass(eq=False)
class Meeting:
    """One operation: what its members called it, what each of them brought, and how it ended."""

    title: str
    size: int
    brought: dict[int, object] = field(default_factory=dict)
    titles: dict[int, str] = field(default_factory=dict)
    error: Exception | None = None
    is_over: bool = False

    def end(self, error: Exception | None) -> None:
        self.error = error
        self.is_over = True


class Fabric:
    """Where the ranks of one world of threads meet. Shared by all of them; handed over as `pg_options`."""

    def __init__(self, world_size: int) -> None:
        self._changed = threading.Condition()
        self._running = set(range(world_size))
        self._waiting: dict[int, Meeting] = {}
        self._open: dict[Hashable, Meeting] = {}

    def join(
        self, key: Hashable, title: str, size: int, member: int, payload: Payload, combine: Combine[Payload]
    ) -> Meeting:
        """Member `member` of `size` comes to the meeting `key`; the last one runs `combine` on payloads by member."""
        with self._changed:
            meeting = self._open.setdefault(key, Meeting(title, size))
            meeting.brought[member] = payload
            meeting.titles[member] = title
            if len(meeting.brought) == size:
                del self._open[key]
                meeting.end(_hold(meeting, combine))
                self._changed.notify_all()
            return meeting

    def wait(self, meeting: Meeting, global_rank: int, timeout_s: float) -> None:
        """Block until the meeting is over; raises what it ended with, or a deadlock's report."""
        with self._changed:
            self._waiting[global_rank] = meeting
            try:
                self._end_if_deadlocked()
                if not self._changed.wait_for(lambda: meeting.is_over, timeout_s):
                    came = ", ".join(str(member) for member in sorted(meeting.brought))
                    raise CollectiveTimeoutError(
                        meeting.title,
                        f"only group ranks {came} of {meeting.size} came within {timeout_s:g} s.",
                        "Look for a rank that hangs or takes another branch.",
                        rank=global_rank,
                    )
            finally:
                del self._waiting[global_rank]
        if meeting.error is not None:
            raise meeting.error

    def leave(self, global_rank: int) -> None:
        """The thread of `global_rank` has ended; whoever waits for it alone waits for nothing."""
        with self._changed:
            self._running.discard(global_rank)
            self._end_if_deadlocked()

    def _end_if_deadlocked(self) -> None:
        waiting = {rank: meeting for rank, meeting in self._waiting.items() if not meeting.is_over}
        if not waiting or set(waiting) != self._running:
            return
        stuck = "; ".join(f"rank {rank} waits in {waiting[rank].title}" for rank in sorted(waiting))
        for meeting in waiting.values():
            meeting.end(
                CollectiveMismatchError(
                    meeting.title,
                    f"deadlock: {stuck}; every other rank has ended.",
                    "Make all members of a group call the same operations in the same order.",
                )
            )
        self._open = {key: meeting for key, meeting in self._open.items() if not meeting.is_over}
        self._changed.notify_all()


def _hold(meeting: Meeting, combine: Combine[Payload]) -> Exception | None:
    if len(set(meeting.titles.values())) > 1:
        calls = "; ".join(f"group rank {member} called {meeting.titles[member]}" for member in sorted(meeting.titles))
        return CollectiveMismatchError(
            meeting.title, f"the members called different operations: {calls}.", "Call the same one on every rank."
        )
    try:
        # The thread that came last writes for all: to any tensor, and beside autograd, as transports do.
        with torch.inference_mode():
            combine([meeting.brought[member] for member in range(meeting.size)])  # type: ignore[misc]
    except (RuntimeError, ValueError) as error:
        return BackendError(meeting.title, f"it failed on the values the members brought: {error}")
    return None


class MeetingWork:
    """The handle of a meeting for one of its members."""

    __slots__ = ("_fabric", "_global_rank", "_meeting", "_timeout_s")

    def __init__(self, fabric: Fabric, meeting: Meeting, global_rank: int, timeout_s: float) -> None:
        self._fabric = fabric
        self._meeting = meeting
        self._global_rank = global_rank
        self._timeout_s = timeout_s

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._fabric.wait(
            self._meeting, self._global_rank, self._timeout_s if timeout is None else timeout.total_seconds()
        )
        return True

    def is_completed(self) -> bool:
        return self._meeting.is_over


class ThreadsBackend(Backend):
    """Collectives among threads. The world is made by `disttrain.testing.run_threads`."""

    devices = ("cpu", "cuda")

    def __init__(self, membership: Membership) -> None:
        fabric = membership.options
        if not isinstance(fabric, Fabric):
            raise BackendError(
                "init_process_group",
                f"backend 'threads' needs pg_options=Fabric(world_size), not {fabric!r}.",
                "Let disttrain.testing.run_threads make the world.",
                rank=membership.global_rank,
            )
        self._fabric = fabric
        self._membership = membership
        self._num_collectives = 0
        self._num_messages: Counter[Hashable] = Counter()

    def all_reduce(self, tensor: torch.Tensor, op: Reduction, async_op: bool) -> TransportWork:
        def combine(tensors: Sequence[torch.Tensor]) -> None:
            total = _reduce(tensors, op)
            for member in tensors:
                member.copy_(total)

        return self._meet(f"all_reduce {_op_name(op)} {_signature(tensor)}", tensor, combine)

    def broadcast(self, tensor: torch.Tensor, src_rank: int, async_op: bool) -> TransportWork:
        def combine(tensors: Sequence[torch.Tensor]) -> None:
            for member in tensors:
                if member is not tensors[src_rank]:
                    member.copy_(tensors[src_rank])

        return self._meet(f"broadcast from group rank {src_rank} {_signature(tensor)}", tensor, combine)

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor, async_op: bool) -> TransportWork:
        def combine(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
            gathered = torch.cat([pair[1].reshape(-1) for pair in pairs])
            for pair in pairs:
                pair[0].view(-1).copy_(gathered)

        return self._meet(f"all_gather_into_tensor {_signature(input)}", (output, input), combine)

    def reduce_scatter_tensor(
        self, output: torch.Tensor, input: torch.Tensor, op: Reduction, async_op: bool
    ) -> TransportWork:
        def combine(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
            parts = _reduce([pair[1].reshape(-1) for pair in pairs], op).view(len(pairs), -1)
            for pair, part in zip(pairs, parts, strict=True):
                pair[0].view(-1).copy_(part)

        return self._meet(f"reduce_scatter_tensor {_op_name(op)} {_signature(input)}", (output, input), combine)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        async_op: bool,
    ) -> TransportWork:
        def combine(parts: Sequence[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]]) -> None:
            for rank, (outputs, _) in enumerate(parts):
                for target, (_, inputs) in zip(outputs, parts, strict=True):
                    target.copy_(inputs[rank])

        payload = (output.split(list(output_splits)), input.split(list(input_splits)))
        return self._meet("all_to_all_single", payload, combine)

    def barrier(self, device: torch.device) -> TransportWork:
        return self._meet("barrier", None, lambda _: None)

    def send(self, tensor: torch.Tensor, dst_rank: int, tag: int) -> TransportWork:
        return self._pass_message(tensor, self._membership.rank, dst_rank, tag)

    def recv(self, tensor: torch.Tensor, src_rank: int, tag: int) -> TransportWork:
        return self._pass_message(tensor, src_rank, self._membership.rank, tag)

    def shutdown(self) -> None:
        """Nothing to let go of: the threads are the caller's."""

    def _meet(self, title: str, payload: Payload, combine: Combine[Payload]) -> TransportWork:
        self._num_collectives += 1
        key = (self._membership.name, self._num_collectives)
        return self._join(key, title, self._membership.size, self._membership.rank, payload, combine)

    def _pass_message(self, tensor: torch.Tensor, src_rank: int, dst_rank: int, tag: int) -> TransportWork:
        channel = (self._membership.name, src_rank, dst_rank, tag)
        self._num_messages[channel] += 1
        title = f"message from group rank {src_rank} to {dst_rank}, tag {tag}, {_signature(tensor)}"
        member = 0 if self._membership.rank == src_rank else 1

        def combine(ends: Sequence[torch.Tensor]) -> None:
            ends[1].copy_(ends[0])

        return self._join((*channel, self._num_messages[channel]), title, 2, member, tensor, combine)

    def _join(
        self, key: Hashable, title: str, size: int, member: int, payload: Payload, combine: Combine[Payload]
    ) -> TransportWork:
        membership = self._membership
        meeting = self._fabric.join(key, title, size, member, payload, combine)
        return MeetingWork(self._fabric, meeting, membership.global_rank, membership.timeout_s)


def _signature(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _op_name(op: Reduction) -> str:
    return next(name for name, value in ReduceOp.RedOpType.__members__.items() if op == value)


def _reduce(tensors: Sequence[torch.Tensor], op: Reduction) -> torch.Tensor:
    folds: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "SUM": torch.add,
        "AVG": torch.add,
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }
    name = _op_name(op)
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = folds[name](total, tensor)
    return total / len(tensors) if name == "AVG" else total
