"""The world: which job this process is a rank of. Holds rank, store, groups and observers."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

import torch

from disttrain._python.thread_errors import ThreadErrors
from disttrain.errors import GroupError
from disttrain.process_group._c10d import forget_ranks
from disttrain.process_group.group import DROPPED_S, ProcessGroup
from disttrain.process_group.holders import release_holders
from disttrain.process_group.joining.connecting import Connecting
from disttrain.process_group.watching.comparing import Comparing
from disttrain.process_group.watching.observer import Observer, Recorder
from disttrain.process_group.watching.refusals import Refusals
from disttrain.process_group.watching.script_end import ScriptEnd
from disttrain.process_group.watching.stopping import Stopping
from disttrain.process_group.work import Work
from disttrain.ranks import Ranks
from disttrain.settings import DEBUG, LOCAL_RANK
from disttrain.store import Store
from disttrain.store.responder import Responder


class Closable(Protocol):
    """An object that is closed with its world."""

    def close(self) -> None:
        """Let go of what it has; raises nothing."""
        ...


Companion = TypeVar("Companion", bound=Closable)


class NonGroupMember:
    """The result of `new_group` on a rank that is not a member."""

    def __repr__(self) -> str:
        return "NON_GROUP_MEMBER"


NON_GROUP_MEMBER: Final = NonGroupMember()


class World:
    """This process's place in a job: `rank`, `world_size`, `store`, `device`, and the groups made so far.

    `device` is the one this rank computes on: what `init_process_group(device_id=...)` said, else the GPU of its local
    rank, else the CPU. `observers` see every collective; change it with `add_observer` and `remove_observer`. So does
    the `recorder`, if there is one.
    `action`, such as "stage 2 microbatch 5 F", and `module`, a module's path, say what calls are made for, to observers
    and in errors; empty when nobody says. Whoever sets one sets it back. The autograd engine's threads see them, too.
    `refusals`: what ranks raise before a collective.
    `connecting`: connects groups as other ranks ask. `comparing`: what ranks tell each other that wait for long.
    `stopping`: what becomes of a notice that the job has to go.
    `recall`: what this rank has called as a group's collective of a number, and `main_place`: where its main thread is,
    as far as the recorder knows. `thread_errors`: what has ended other threads of this process, once it is a rank.
    `tells_host`: whether it has said in the store on which host it is, as all ranks of the job do then.
    `compares_calls`: whether the ranks compare each collective first (DISTTRAIN_DEBUG=detail); `witness` answers for
    this rank after another's timeout.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        backend: str | None = None,
        timeout_s: float,
        device: torch.device | None = None,
        options: object | None = None,
        owned_store: Store | None = None,
    ) -> None:
        """`owned_store` is closed together with the world."""
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.device = device if device is not None else _own_device()
        self.observers: tuple[Observer, ...] = ()
        self.recorder: Recorder | None = None
        self.action = ""
        self.module = ""
        self.tells_host = False
        self.compares_calls = DEBUG.read() == "detail"
        self.witness: Responder | None = None
        self.refusals = Refusals(self)
        self._script_end: ScriptEnd | None = None
        self.thread_errors: ThreadErrors | None = None
        self.connecting = Connecting(self)
        self.comparing = Comparing(self)
        self.recall: Callable[[str, int], dict[str, Any] | None] = lambda group_name, sequence: None
        self.main_place: Callable[[], str] = str
        self._tell_torch: Callable[[ProcessGroup], object] = lambda group: None
        self._backend = backend
        self._options = options
        self._groups: list[ProcessGroup] = []
        self._shared: dict[tuple[Ranks, str], ProcessGroup] = {}
        self._num_alike: Counter[tuple[Ranks, str]] = Counter()
        self._owned_store = owned_store
        self._companions: dict[type, Any] = {}
        self._named: weakref.WeakValueDictionary[str, ProcessGroup] = weakref.WeakValueDictionary()
        self._pending: dict[int, tuple[torch.Tensor, Work]] = {}
        self._handles = itertools.count(1)
        self.default_group = self._make_group("world", Ranks.of(range(world_size)), backend, timeout_s, options)
        has_peers = any(kind.has_peers for kind in self.default_group.backend_classes.values())
        self.stopping = Stopping(self, self.default_group, is_alone=world_size == 1 or not has_peers)

    def new_group(
        self,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
        backend: str | None = None,
        options: object | None = None,
    ) -> ProcessGroup | NonGroupMember:
        """A group of the given global ranks (None: all). Costs no communication; only members need to call.

        Members that make several groups of the same ranks make them in the same order: the name counts them.
        """
        members = self.default_group.members if ranks is None else Ranks.of(ranks)
        self._check_ranks(members)
        if self.rank not in members:
            return NON_GROUP_MEMBER
        return self._make_group(
            f"{_content_name(members)}.{self._count_alike(members, 'new')}",
            members,
            backend if backend is not None else self._backend,
            timeout_s if timeout_s is not None else self.timeout_s,
            options if options is not None else self._options,
        )

    def shared_group(self, ranks: Sequence[int], purpose: str = "") -> ProcessGroup:
        """The one group of these global ranks, this rank among them, that meshes share; the default group for all.

        For each `purpose` there is another one, whose collectives do not wait for these.
        """
        members = Ranks.of(ranks)
        if members == self.default_group.members and not purpose:
            return self.default_group
        group = self._shared.get((members, purpose))
        if group is None:
            self._check_ranks(members)
            # Counted apart: some ranks may come to a mesh's group before, others after they make one of these ranks.
            kind = purpose or "shared"
            name = f"{_content_name(members)}.{kind}.{self._count_alike(members, kind)}"
            group = self._make_group(name, members, self._backend, self.timeout_s, self._options)
            self._shared[members, purpose] = group
        return group

    @property
    def groups(self) -> tuple[ProcessGroup, ...]:
        """All groups that have not been destroyed, the default group first."""
        return tuple(self._groups)

    def adopted_group(self, group_name: str, ranks: Sequence[int], backend: str) -> ProcessGroup:
        """A group under the name that somebody else has given it, to be used with their transports."""
        return self._make_group(group_name, Ranks.of(ranks), backend, self.timeout_s, None)

    def find_group(self, operation: str, group_name: str) -> ProcessGroup:
        """The group of that name, as long as somebody holds it. Raises GroupError when there is none."""
        group = self._named.get(group_name)
        if group is None:
            names = sorted(group.group_name for group in self._groups)
            raise GroupError(
                operation,
                f"there is no group {group_name!r} in this world; it has {', '.join(names)}.",
                "A compiled function, or a backward, belongs to the world it was made in: make it again.",
                rank=self.rank,
            )
        return group

    def group_named(self, group_name: str) -> ProcessGroup | None:
        """The group of that name, if this rank has made it and somebody holds it."""
        return self._named.get(group_name)

    def keep_pending(self, output: torch.Tensor, work: Work) -> torch.Tensor:
        """Hold a collective that is under way for a graph, which cannot hold a Work. Returns: a tensor with its handle.

        It is held until somebody takes it, or the tensor is gone: the graph has no use for the result.
        """
        handle = next(self._handles)
        self._pending[handle] = (output, work)
        named = torch.tensor(handle)
        weakref.finalize(named, self._pending.pop, handle, None).atexit = False
        return named

    def take_pending(self, handle: int) -> tuple[torch.Tensor, Work]:
        """The tensor and the work that `keep_pending` was given; only once."""
        try:
            return self._pending.pop(handle)
        except KeyError:
            raise GroupError(
                "wait_tensor",
                f"no collective is under way by handle {handle}.",
                "Wait once for each collective, in the world that started it.",
                rank=self.rank,
            ) from None

    def add_observer(self, observer: Observer) -> None:
        """Show `observer` every collective from now on."""
        self.observers = (*self.observers, observer)

    def remove_observer(self, observer: Observer) -> None:
        self.observers = tuple(other for other in self.observers if other is not observer)

    def companion(self, kind: type[Companion], make: Callable[[], Companion]) -> Companion:
        """This world's one object of a type, made when it is first asked for, and closed before the world ends."""
        if kind not in self._companions:
            self._companions[kind] = make()
        companion: Companion = self._companions[kind]
        return companion

    def note_thread_errors(self) -> None:
        """From now on, keep what ends other threads: the main thread may wait for them, and the others for it."""
        if self.thread_errors is None:
            self.thread_errors = ThreadErrors()

    def become_witness(self) -> None:
        """From now on, tell other ranks how far this one has come when they ask, and hear what they refuse."""
        if self.witness is None:
            self.witness = Responder(self.store, "witness", self.rank, self.comparing.answer, self._hear)
            self.comparing.stay()
            self.connecting.stay()
            self._script_end = ScriptEnd(self)

    def destroy_group(self, group: ProcessGroup) -> None:
        if group not in self._groups:
            raise GroupError(
                "destroy_process_group",
                f"group {group.group_name} has been destroyed already.",
                "Destroy it once.",
                rank=self.rank,
            )
        self.refusals.tell()
        release_holders(group)
        group.shutdown()
        self._forget(group)
        del self._named[group.group_name]

    def abort_group(self, group: ProcessGroup) -> None:
        """Let go of `group` without waiting for what is under way in it. Idempotent."""
        self.refusals.tell()
        release_holders(group)
        group.abort()
        self._forget(group)

    def make_ranks_known(self, tell: Callable[[ProcessGroup], object]) -> None:
        """`tell` torch of each group, those that are there and those that will be made."""
        self._tell_torch = tell
        for group in self._groups:
            tell(group)

    def _forget(self, group: ProcessGroup) -> None:
        forget_ranks(group)
        self._groups = [other for other in self._groups if other is not group]
        self._shared = {key: shared for key, shared in self._shared.items() if shared is not group}

    def destroy(self) -> None:
        """Let go of all groups, and of the store if the world opened it."""
        if self.recorder is not None:
            self.recorder.close()
        while self._companions:
            self._companions.popitem()[1].close()
        self.refusals.close()
        self.stopping.close()
        self.connecting.close()
        if self._script_end is not None:
            self._script_end.close()
        if self.thread_errors is not None:
            self.thread_errors.close()
        if self.witness is not None:
            self.comparing.leave()
        end_s = time.monotonic() + DROPPED_S
        for group in reversed(self._groups):
            release_holders(group)
            group.shutdown(max(0.0, end_s - time.monotonic()))
        self._groups.clear()
        self._pending.clear()
        if self.witness is not None:
            self.witness.close()
        if self._owned_store is not None:
            self._owned_store.close()

    def _count_alike(self, ranks: Ranks, kind: str) -> int:
        self._num_alike[ranks, kind] += 1
        return self._num_alike[ranks, kind]

    def _hear(self, notice: bytes) -> bool:
        said = json.loads(notice)
        if isinstance(said, list):
            return self.refusals.hear(said)
        if "stop" in said:
            self.stopping.hear(said)
        else:
            (self.comparing if "mismatch" in said else self.connecting).hear(said)
        return True

    def _make_group(
        self, name: str, ranks: Ranks, backend: str | None, timeout_s: float, options: object | None
    ) -> ProcessGroup:
        with self.connecting.lock:
            group = self.connecting.make(name, ranks, backend, timeout_s, options)
            self._groups.append(group)
            self._named[name] = group
            self._tell_torch(group)
            return group

    def _check_ranks(self, ranks: Ranks) -> None:
        is_outside = bool(ranks) and not 0 <= ranks.lowest <= ranks.highest < self.world_size
        if is_outside or not ranks or ranks.repeats:
            offending = [rank for rank in ranks if not 0 <= rank < self.world_size]
            problem = (
                f"ranks {offending} are out of range" if offending else f"ranks {list(ranks)} are empty or repeated"
            )
            raise GroupError(
                "new_group",
                f"{problem}; the world has ranks 0 to {self.world_size - 1}.",
                "Name each member once.",
                rank=self.rank,
            )


def world_of(group: ProcessGroup) -> World:
    """The world that has made `group`, which itself needs to know less of it."""
    assert isinstance(group.world, World)
    return group.world


def _content_name(ranks: Ranks) -> str:
    """Ranks that make a group name it alike without talking to each other."""
    return hashlib.sha256(json.dumps(ranks.plain()).encode()).hexdigest()[:12]


def _own_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = LOCAL_RANK.read()
    return torch.device(
        "cuda", torch.cuda.current_device() if local_rank is None else local_rank % torch.cuda.device_count()
    )
