"""The interface of a backend, which moves tensors of some device types among the members of one group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch

from disttrain.errors import BackendError, SettingError
from disttrain.process_group._c10d import Reduction
from disttrain.process_group.work import JoinedWork, TransportWork
from disttrain.ranks import Ranks
from disttrain.store import Store


class GivableUp:
    """Tells handles that wait whether the group has been given up, and for which `reason`.

    `dropped` are operations whose handles went while they were under way, so that nobody waits for them. A wait of more
    than a moment calls `look(problem)` repeatedly, and `looked` at its end. `look` finds out whether the operation can
    still complete; with a `problem` it cannot.
    """

    __slots__ = ("dropped", "is_given_up", "look", "looked", "reason")

    def __init__(
        self, look: Callable[[str], None] = lambda problem: None, looked: Callable[[], None] = lambda: None
    ) -> None:
        self.look = look
        self.looked = looked
        self.dropped: list[TransportWork] = []
        self.is_given_up = False
        self.reason = ""

    def explain(self, reason: str) -> None:
        """Why it is about to be given up; the first reason holds."""
        if not self.is_given_up:
            self.reason = self.reason or reason

    def check(self) -> None:
        """Raise InterruptedError once it has been given up."""
        if self.is_given_up:
            raise InterruptedError("the group was aborted on this rank")


@dataclass(frozen=True)
class Membership:
    """This process's membership of one group, of which a backend is made.

    `store` is the group's own part of the job's store; `ranks` are global ranks in group order; `options` is what the
    user gave as `pg_options`, for the backend to understand; `scope` says when the group has been given up meanwhile.
    `ask_others` lets the other members make theirs too, if they have not come to it: call it while you wait for them.
    `spans_hosts` says, once all are there, whether members are on several hosts.
    """

    name: str
    rank: int
    ranks: Ranks
    store: Store
    timeout_s: float
    global_rank: int
    options: object | None = None
    scope: GivableUp = field(default_factory=GivableUp)
    ask_others: Callable[[], None] = lambda: None
    spans_hosts: Callable[[], bool] = lambda: False

    @property
    def size(self) -> int:
        return len(self.ranks)


class Backend(ABC):
    """One transport for one group. Made by all members at their first collective on a device that it serves.

    Every method starts the operation and returns a handle; `async_op=False` promises that the caller waits at once, so
    that a stream-ordered transport may run on the caller's stream. Arguments have been checked by the caller: tensors
    are contiguous, alike in dtype and device, and fit in size. Ranks are ranks in the group.

    What is abstract here every backend must have. The rest it may leave out; calling it is then an error that says so.
    """

    GLOO: ClassVar = "gloo"
    NCCL: ClassVar = "nccl"
    MPI: ClassVar = "mpi"
    UCC: ClassVar = "ucc"
    XCCL: ClassVar = "xccl"
    UNDEFINED: ClassVar = "undefined"
    default_device_backend_map: ClassVar[Mapping[str, str]] = {"cpu": "gloo", "cuda": "nccl"}
    """The backend of a device type unless somebody says otherwise. This name is torch's, as those above: of them only
    gloo and nccl are here, the others for who compares what get_backend() gives."""

    devices: ClassVar[tuple[str, ...]]
    """Device types that this kind of transport can serve."""

    coalesces: ClassVar[bool] = False
    """True when `start_coalescing` and `end_coalescing` make one launch of what is called between them."""

    has_peers: ClassVar[bool] = True
    """False when the other ranks of a group are played: none comes, so that nobody waits for them."""

    reports_absent: ClassVar[bool] = True
    """True when the ranks that did not come are to be asked for after a timeout; False: its own errors name them."""

    def __new__(cls, *args: Any) -> Any:
        """`Backend("GLOO")` is "gloo", as torch has it; raises SettingError for what is no name."""
        if cls is not Backend or (args and isinstance(args[0], Membership)):
            return super().__new__(cls)
        if len(args) != 1 or not isinstance(args[0], str):
            raise SettingError("Backend", f"{args} is no name of a transport.", "Give a str, such as 'gloo'.")
        return args[0].lower()

    @abstractmethod
    def __init__(self, membership: Membership) -> None: ...

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: Reduction, async_op: bool) -> TransportWork: ...

    def reduces_sparse(self, tensor: torch.Tensor, op: Reduction) -> bool:
        """True when `all_reduce` takes this tensor, which is no dense one."""
        return False

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, src_rank: int, async_op: bool) -> TransportWork: ...

    @abstractmethod
    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor, async_op: bool) -> TransportWork: ...

    @abstractmethod
    def reduce_scatter_tensor(
        self, output: torch.Tensor, input: torch.Tensor, op: Reduction, async_op: bool
    ) -> TransportWork: ...

    @abstractmethod
    def barrier(self, device: torch.device) -> TransportWork: ...

    @abstractmethod
    def send(self, tensor: torch.Tensor, dst_rank: int, tag: int) -> TransportWork: ...

    @abstractmethod
    def recv(self, tensor: torch.Tensor, src_rank: int, tag: int) -> TransportWork: ...

    @abstractmethod
    def shutdown(self, wait_s: float) -> None:
        """Let go of connections and threads. Operations under way may fail on other ranks.

        For those whose handles nobody has it may wait, for `wait_s` seconds at most.
        """

    def set_timeout(self, timeout_s: float) -> None:
        """Wait for so long at most, in operations from now on. What has no peers waits for nobody."""
        if self.has_peers:
            raise self._lacks("set_timeout")

    def reduce(self, tensor: torch.Tensor, dst_rank: int, op: Reduction, async_op: bool) -> TransportWork:
        """Reduce in place at the destination; the other ranks' tensors are left as they are."""
        raise self._lacks("reduce")

    def all_gather(self, outputs: Sequence[torch.Tensor], input: torch.Tensor, async_op: bool) -> TransportWork:
        """`outputs` may have different sizes, alike on all ranks."""
        raise self._lacks("all_gather")

    def gather(
        self, input: torch.Tensor, outputs: Sequence[torch.Tensor], dst_rank: int, async_op: bool
    ) -> TransportWork:
        """`outputs` is empty but at the destination."""
        raise self._lacks("gather")

    def scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], src_rank: int, async_op: bool
    ) -> TransportWork:
        """`inputs` is empty but at the source."""
        raise self._lacks("scatter")

    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Reduction, async_op: bool
    ) -> TransportWork:
        """`inputs` may have different sizes, alike on all ranks."""
        raise self._lacks("reduce_scatter")

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], async_op: bool
    ) -> TransportWork:
        raise self._lacks("all_to_all")

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        async_op: bool,
    ) -> TransportWork:
        """Splits are numbers of rows of dim 0, one per rank."""
        raise self._lacks("all_to_all_single")

    def all_reduce_tensors(self, tensors: Sequence[torch.Tensor], op: Reduction, async_op: bool) -> TransportWork:
        """As all_reduce of each, in one message where the transport can."""
        return JoinedWork([self.all_reduce(tensor, op, True) for tensor in tensors])

    def all_gather_lists(
        self, output_lists: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], async_op: bool
    ) -> TransportWork:
        """As all_gather of each input; of outputs there is a list for each rank. In one message where it can be."""
        by_input = zip(inputs, zip(*output_lists, strict=True), strict=True)
        return JoinedWork([self.all_gather(outputs, input_, True) for input_, outputs in by_input])

    def all_gather_into_tensors(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], async_op: bool
    ) -> TransportWork:
        """As all_gather_into_tensor for each pair, in one launch where the transport can."""
        pairs = zip(outputs, inputs, strict=True)
        return JoinedWork([self.all_gather_into_tensor(output, input_, True) for output, input_ in pairs])

    def reduce_scatter_tensors(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], op: Reduction, async_op: bool
    ) -> TransportWork:
        """As reduce_scatter_tensor for each pair, in one launch where the transport can."""
        pairs = zip(outputs, inputs, strict=True)
        return JoinedWork([self.reduce_scatter_tensor(output, input_, op, True) for output, input_ in pairs])

    def recv_any(self, tensor: torch.Tensor, tag: int) -> AnySourceWork:
        """Receive from whoever sends first."""
        raise self._lacks("recv from any source")

    def start_coalescing(self) -> None:  # noqa: B027 -- to do nothing is what most transports need
        """Hold back what is called from now on."""

    def end_coalescing(self) -> TransportWork:
        """Start what was held back, as one."""
        return CompletedWork()

    def abort(self) -> None:
        """Give up what is under way, without asking the other ranks, and let go."""
        self.shutdown(0.0)

    @classmethod
    def is_available(cls) -> bool:
        """True when this machine can run it."""
        return True

    @classmethod
    def short_name(cls) -> str:
        """As users name it: `GlooBackend` is gloo."""
        return cls.__name__.removesuffix("Backend").lower()

    def _lacks(self, operation: str) -> BackendError:
        return BackendError(
            operation, f"backend {self.short_name()!r} does not have it.", "Use another backend or operation."
        )


class CompletedWork:
    """The handle of an operation that is over already."""

    __slots__ = ()

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future


class AnySourceWork(TransportWork, Protocol):
    """A handle that knows, once it is over, who has sent."""

    def source_rank(self) -> int:
        """The sender's rank in the group."""
        ...
