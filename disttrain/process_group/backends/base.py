"""What a backend promises: it moves tensors of some device types among the members of one group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from disttrain.process_group._c10d import Reduction
from disttrain.process_group.work import TransportWork
from disttrain.store import Store


@dataclass(frozen=True)
class Membership:
    """Who makes a backend: this process's place in one group.

    `store` is the group's own part of the job's store; `ranks` are global ranks in group order; `options` is what the
    user gave as `pg_options`, for the backend to understand.
    """

    name: str
    rank: int
    ranks: tuple[int, ...]
    store: Store
    timeout_s: float
    global_rank: int
    options: object | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)


class Backend(ABC):
    """One transport for one group. Made by all members at their first collective on a device that it serves.

    Every method starts the operation and returns a handle; `async_op=False` promises that the caller waits at once, so
    that a stream-ordered transport may run on the caller's stream. Arguments have been checked by the caller. Ranks are
    ranks in the group.
    """

    devices: ClassVar[tuple[str, ...]]
    """Device types that this kind of transport can serve."""

    @abstractmethod
    def __init__(self, membership: Membership) -> None: ...

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: Reduction, async_op: bool) -> TransportWork: ...

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, src_rank: int, async_op: bool) -> TransportWork: ...

    @abstractmethod
    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor, async_op: bool) -> TransportWork: ...

    @abstractmethod
    def reduce_scatter_tensor(
        self, output: torch.Tensor, input: torch.Tensor, op: Reduction, async_op: bool
    ) -> TransportWork: ...

    @abstractmethod
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        async_op: bool,
    ) -> TransportWork:
        """Splits are numbers of rows of dim 0, one per rank."""

    @abstractmethod
    def barrier(self, device: torch.device) -> TransportWork: ...

    @abstractmethod
    def send(self, tensor: torch.Tensor, dst_rank: int, tag: int) -> TransportWork: ...

    @abstractmethod
    def recv(self, tensor: torch.Tensor, src_rank: int, tag: int) -> TransportWork: ...

    @abstractmethod
    def shutdown(self) -> None:
        """Let go of connections and threads. Operations under way may fail on other ranks."""

    @classmethod
    def is_available(cls) -> bool:
        """True when this machine can run it."""
        return True


class CompletedWork:
    """The handle of an operation that is over already."""

    __slots__ = ()

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True
