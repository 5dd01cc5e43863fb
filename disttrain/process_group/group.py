"""A group: some ranks of the world, in order, and one transport per kind of device that they have used so far."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, cast

import torch

from disttrain._python.awaited_threads import AWAITED
from disttrain.arguments import answer_to
from disttrain.errors import BackendError, GroupError, StoreError
from disttrain.process_group._c10d import TorchRegistration, Transport
from disttrain.process_group.backends import Backend, GivableUp, Membership
from disttrain.process_group.backends.c10d_backend import C10dBackend
from disttrain.process_group.beside.torch_methods import add_torch_methods
from disttrain.process_group.home import HomeWorld
from disttrain.process_group.joining.asking import ask_no_more, ask_to_connect
from disttrain.process_group.joining.hosts import leaves_host
from disttrain.process_group.watching.comparing import look_for_gone
from disttrain.process_group.watching.observer import Call
from disttrain.process_group.work import Work
from disttrain.ranks import Ranks
from disttrain.store import PrefixStore

DROPPED_S: Final = 5.0
"""The time that destroyed groups of a world together wait for collectives whose handles are gone."""


class ProcessGroup:
    """Ranks that call collectives together.

    Attributes: `world`; `members`, the global ranks in group order, which `ranks` lists; `group_rank`, `group_size`;
    `group_name`, alike on all members and derived from the ranks alone; `timeout_s`; `sequence`, the number of
    collectives issued so far, and `last_operation`, the last one's name; by sequence number, `num_refused`, how often
    this rank has raised in place of that collective, and `num_agreed`, recorded what follows it; `waiting_in`, the
    one that the host waits for, or has waited for last; `coalesced`, what was called within `coalescing_manager`;
    `axis_name`, of its first mesh axis; `spans_hosts`, once it is known; `barrier_device`, this rank's GPU with NCCL.
    Transports are made by the first collective on a device type; members that have not come to it connect beside what
    they do (`joining/connecting.py`).
    """

    def __init__(
        self,
        world: HomeWorld,
        group_name: str,
        ranks: Ranks,
        backends: dict[str, type[Backend]],
        timeout_s: float,
        options: object | None,
    ) -> None:
        self.world = world
        self.group_name = group_name
        self.members = ranks
        self.group_rank = cast(int, ranks.position(world.rank))
        self.group_size = len(ranks)
        self.timeout_s = timeout_s
        self.sequence = self.waiting_in = 0
        self.last_operation = ""
        self.num_refused: dict[int, int] = {}
        self.num_agreed: dict[int, int] = {}
        self.coalesced: list[Work] | None = None
        self.axis_name = ""
        self.spans_hosts: bool | None = None
        self.barrier_device = world.device if world.device.type in backends else torch.device("cpu")
        self._options = options
        self._backend_classes = backends
        self._made: dict[str, Backend] = {}
        self._failures: dict[str, Exception] = {}
        self._lock = threading.Lock()
        self._scope = GivableUp(partial(world.comparing.look, self), partial(world.comparing.waited, self))
        self._callbacks: list[Callable[[], None]] = []
        self._connecting = ""
        self._is_destroyed = False
        self.callable: Any = None
        """An object with the methods of torch's groups, once one of them was used (`beside/torch_methods.py`)."""
        self.torch_group: Any = None
        self.registration: TorchRegistration | None = None
        """torch's ProcessGroup over the same transports, and torch's own object for the group, if there are."""
        self.messenger: Any = None
        """Sends the messages of pipelines over this group, once there is one (`pipelining/runtime/messages.py`)."""
        self.transfer_cost: Any = None
        """The cost of a gather over it, once it has been measured (`fsdp2/transfers/measuring.py`)."""
        self.costs_of_mesh: dict[Any, Any] = {}
        """As all ranks of a mesh know it along both axes, of which this is the first; by the ranks of the second."""
        self.peer_memory: Any = None
        self.peer_slots: Any = None
        """Memory that its ranks share, and what attention in a ring has of it, once somebody has asked for it."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks, in group order, listed anew each time; `members` has them by their rule."""
        return self.members.listed

    def rank(self) -> int:
        """This process's rank in the group."""
        return self.group_rank

    def size(self) -> int:
        """Number of ranks in the group."""
        return self.group_size

    @property
    def backend_name(self) -> str:
        """Such as `cpu:gloo,cuda:nccl`."""
        named = (f"{device}:{kind.short_name()}" for device, kind in self._backend_classes.items())
        return ",".join(named)

    @property
    def asks_witnesses(self) -> bool:
        """True when its ranks are processes that wait for each other without knowing what the others do."""
        return self.group_size > 1 and any(kind.reports_absent for kind in self._backend_classes.values())

    @property
    def is_connecting(self) -> bool:
        """True while the first collective on a device waits for the other ranks to connect."""
        return bool(self._connecting)

    def is_connected(self, device_type: str) -> bool:
        """True once tensors on `device_type` have been used, here or by another member."""
        return device_type in self._made

    @property
    def come_to(self) -> tuple[int, str]:
        """The last collective that this rank has come to, also if it is still connecting for it: number and name."""
        connecting = self._connecting
        return (self.sequence + 1, connecting) if connecting else (self.sequence, self.last_operation)

    def check(self) -> None:
        """Raise InterruptedError when the group has been given up."""
        self._scope.check()

    @property
    def ended_by(self) -> str:
        """Why another rank's mistake has ended the group; empty when it has not."""
        return self._scope.reason

    def find_reason(self) -> str:
        """As `ended_by`, after a failure: another rank may have said why before this one's witness has read it."""
        if not self.ended_by and self.asks_witnesses and self.world.witness is not None:
            self.world.witness.hear_again()
        return self.ended_by

    def connect_beside(self, device_type: str) -> None:
        """Connect as another member asks, in a thread of its own. A failure is the first use's to raise."""
        try:
            self._connected("connect", device_type)
        except Exception as error:  # noqa: BLE001 -- whatever it is, this rank's own call raises it
            self._failures[device_type] = error

    def takes_over(self, backends: dict[str, type[Backend]], timeout_s: float, options: object | None) -> bool:
        """Become what this rank itself makes, which was made in advance; False where it is of other transports."""
        if backends != self._backend_classes:
            return False
        self.timeout_s, self._options = timeout_s, options
        return True

    def set_timeout(self, timeout_s: float) -> None:
        """From now on each of its collectives waits for so long at most, on this rank."""
        self.timeout_s = timeout_s
        for backend in self._made.values():
            backend.set_timeout(timeout_s)

    def serves(self, device_type: str) -> bool:
        return device_type in self._backend_classes

    def backend(self, operation: str, device_type: str) -> Backend:
        """The transport for tensors on `device_type`. Collective when it is the first use; made once."""
        return self._made.get(device_type) or self._make_backend(operation, device_type)

    def backend_of(self, operation: str, tensor: torch.Tensor) -> Backend:
        """As `backend`, for the device of a tensor."""
        # At every call: `device.type` makes a text, and takes longer than all else here.
        device_type = "cpu" if tensor.is_cpu else "cuda" if tensor.is_cuda else tensor.device.type
        return self._made.get(device_type) or self._make_backend(operation, device_type)

    def group_rank_of(self, operation: str, rank: int) -> int:
        """The rank in the group of global rank `rank`. Raises GroupError for a rank that is not a member."""
        group_rank = self.members.position(rank)
        if group_rank is None:
            raise GroupError(
                operation,
                f"global rank {rank} is not a member of group {self.group_name}, which has ranks {self.ranks_text()}.",
                "Give a global rank of the group, or a rank in the group by group_src or group_dst.",
                rank=self.world.rank,
            )
        return group_rank

    def checked_group_rank(self, operation: str, group_rank: int) -> int:
        """`group_rank` itself; raises GroupError when it is out of range."""
        try:
            is_member = 0 <= operator.index(group_rank) < self.group_size
        except TypeError:  # it is no whole number
            is_member = False
        if not is_member:
            raise GroupError(
                operation,
                f"group rank {group_rank} is out of range for group {self.group_name} of size {self.group_size}.",
                f"Give 0 to {self.group_size - 1}.",
                rank=self.world.rank,
            )
        return group_rank

    def ranks_text(self) -> str:
        """The global ranks, abbreviated: `0-7` or `0,2,4,6`."""
        return self.members.text

    @property
    def device_types(self) -> tuple[str, ...]:
        """The device types that the group has transports for."""
        return tuple(self._backend_classes)

    def to_torch(self) -> Any:
        """This group as a torch.distributed.ProcessGroup over the same transports, for all of torch.distributed.

        The default group becomes torch's default group, so that torch.distributed is initialised; it comes first.
        Destroying this group, or the world, takes it from torch again. Collectives of both kinds share one order.
        Raises:  GroupError when torch.distributed belongs to another job; BackendError for a backend without C++ half.
        Collective where the group has NCCL: every rank of the group, which connects for all of its devices.
        """
        # Here: what torch calls stands above groups.
        from disttrain.process_group.beside.torch_registration import register

        return register(self)

    @property
    def backend_classes(self) -> Mapping[str, type[Backend]]:
        """The kind of transport for each device type."""
        return self._backend_classes

    def forget_registration(self) -> None:
        """torch knows no group of ours any longer."""
        self.world.make_ranks_known(lambda group: None)
        self.registration = self.torch_group = None

    def adopt(self, torch_group: Any, transports: dict[str, Transport]) -> None:
        """Use the transports of torch's `torch_group`, by device type, and leave them to torch."""
        for device_type, transport in transports.items():
            kind = self._backend_classes[device_type]
            assert issubclass(kind, C10dBackend)
            self._made[device_type] = kind.adopting(transport, self._membership(device_type))
        self.torch_group = torch_group

    def transport(self, device_type: str) -> tuple[str, Transport]:
        """Name and C++ half of what serves a device type; connects it. Raises BackendError where there is none."""
        backend = self.backend("to_torch", device_type)
        if not isinstance(backend, C10dBackend):
            raise BackendError(
                "to_torch",
                f"group {self.group_name} uses {self.backend_name}; torch can share Gloo and NCCL only.",
                "Choose these, or leave `backend` out.",
                rank=self.world.rank,
            )
        return backend.short_name(), backend.transport

    def shutdown(self, wait_s: float = DROPPED_S) -> None:
        """Let go of the transports, after `wait_s` at most; the group cannot be used afterwards."""
        self._is_destroyed = True
        if self.registration is not None:
            self.registration.undo()
        for backend in self._made.values():
            backend.shutdown(wait_s)
        self._made.clear()

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Call this, in a thread of its own, when the group is given up: who waits apart from transports goes on."""
        self._callbacks.append(callback)

    def abort(self) -> None:
        """Give up what is under way, without asking the other ranks; the group cannot be used afterwards."""
        self._call_back()
        self._scope.is_given_up = True  # for who is still connecting; there is no backend yet to say so
        for backend in self._taken_out():
            backend.abort()

    def refuse(self, operation: str, error: Exception, begins_with: str = "") -> None:
        """This rank is about to raise `error` before it has come to `operation`: the others must not wait for it.

        `begins_with` is the collective that `operation` begins with, if it is not one itself.
        Raises: ArgumentError in place of Python's error, for an argument of a collective that is of the wrong kind.
        """
        answer = (answer_to(operation, error, self.world.rank) if not begins_with else None) or error
        self.world.refusals.add(self, operation, answer, begins_with or operation, was_counted=False)
        if answer is not error:
            raise answer from error

    def give_up(self, operation: str, error: Exception) -> None:
        """End the group on all ranks: this one has failed in `operation`, and cannot come to what the others wait for.

        They learn the reason from witnesses, if the transport has them; those that wait for this rank learn it at once.
        """
        self.world.refusals.end(self, operation, error)
        self.end(f"{operation} has failed on this rank")

    def end(self, reason: str) -> None:
        """As `abort`, and every call under way, or made later, raises an error with this `reason`."""
        self._scope.explain(reason)
        backends = self._taken_out()
        # Last: who waits goes on from here, and its next call must not find a backend that ends under it.
        self._scope.is_given_up = True
        self._call_back()
        for backend in backends:
            # Gloo may take its time, and the witness, who calls this, has others to answer.
            AWAITED.start(backend.abort, "disttrain abort")

    def __repr__(self) -> str:
        return f"ProcessGroup({self.group_name}, ranks {self.ranks_text()}, {self.backend_name})"

    def _call_back(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            AWAITED.start(callback, "disttrain ended")

    def _taken_out(self) -> list[Backend]:
        """The backends; nobody finds them any more, nor makes new ones."""
        self._is_destroyed = True
        made, self._made = self._made, {}
        return list(made.values())

    def _make_backend(self, operation: str, device_type: str) -> Backend:
        self._connecting = operation
        try:
            return self._connected(operation, device_type)
        except Exception as error:
            # Connecting belongs to the operation that needs it, and fails like it.
            answer = Call(operation, self, self.sequence + 1, (), ()).failure(error)
            if answer is error:
                raise
            raise answer from error
        finally:
            self._connecting = ""

    def _connected(self, operation: str, device_type: str) -> Backend:
        # Several threads may come together: the autograd engine's, one per device, and the one that others asked for.
        with self._lock:
            made = self._made.get(device_type)
            if made is not None:
                return made
            if self._is_destroyed:
                raise self._destroyed_error(operation)
            kind = self._backend_classes.get(device_type)
            if kind is None:
                raise BackendError(
                    operation,
                    f"no backend of group {self.group_name} serves device {device_type!r}; it has {self.backend_name}.",
                    "Move the tensor, or leave `backend` out of init_process_group to get all that this machine has.",
                    rank=self.world.rank,
                )
            if device_type in self._failures:
                raise self._failures[device_type]
            if kind.reports_absent and self.group_size > 1:
                self.world.become_witness()
            made = kind(self._membership(device_type))
            self._made[device_type] = made
        ask_no_more(self, device_type)
        if made in self._came_too_late():
            made.abort()
            # A refusal has found this call waiting, as it finds those that wait for a result.
            raise InterruptedError(self.ended_by) if self.ended_by else self._destroyed_error(operation)
        return made

    def _came_too_late(self) -> list[Backend]:
        """Takes out backends that connected while the group ended, too late for `end` or `abort`."""
        return self._taken_out() if self._is_destroyed else []

    def _destroyed_error(self, operation: str) -> GroupError:
        reason = f"ended: {self.ended_by}".rstrip(".") if self.ended_by else "been destroyed"
        return GroupError(
            operation,
            f"group {self.group_name} has {reason}.",
            "Make a new group, or destroy it later.",
            rank=self.world.rank,
        )

    def _ask_others(self, device_type: str) -> None:
        ask_to_connect(self, device_type)
        if self._connecting:
            with suppress(StoreError):
                look_for_gone(self, self.sequence + 1)

    def _membership(self, device_type: str) -> Membership:
        return Membership(
            name=self.group_name,
            rank=self.group_rank,
            ranks=self.members,
            store=PrefixStore(f"{self.group_name}/{device_type}", self.world.store),
            timeout_s=self.timeout_s,
            global_rank=self.world.rank,
            options=self._options,
            scope=self._scope,
            ask_others=partial(self._ask_others, device_type),
            spans_hosts=partial(leaves_host, self),
        )


add_torch_methods(ProcessGroup)
