"""The default world, and torch.distributed's functions about it.

A process is a rank of at most one job at a time. Where ranks are threads (`disttrain.testing.run_threads`), each thread
has a world of its own, which comes first.
"""

from __future__ import annotations

import importlib
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from disttrain.arguments import arguments_of
from disttrain.errors import GroupError
from disttrain.process_group.backends import choose_backends
from disttrain.process_group.group import ProcessGroup
from disttrain.process_group.joining import rendezvous
from disttrain.process_group.joining.hosts import tell_host
from disttrain.process_group.world import NON_GROUP_MEMBER, NonGroupMember, World
from disttrain.ranks import Ranks
from disttrain.settings import FLIGHT_RECORDER, TIMEOUT_S
from disttrain.store import HashStore, PrefixStore, Store
from disttrain.store.durations import Duration, seconds

_RECORDER: Final = "disttrain.flight_recorder.dumps.triggers"


class _ThreadWorld(threading.local):
    """Each thread's own. Of a default of the class Dynamo 2.11 sees that alone, whatever the thread's is."""

    def __init__(self) -> None:
        self.world: World | None = None


class _Default:
    """The process's world, the world of each thread that is a rank, and how many worlds met at each address."""

    def __init__(self) -> None:
        self.process_world: World | None = None
        self.thread = _ThreadWorld()
        self.left_torchs: int | None = None
        """The id of torch's default group when the process left its last world; None where there was none."""
        self.has_thread_worlds = False
        """True once a thread has had one: until then nobody looks, which takes as long as a small call."""
        self.num_inits: Counter[str] = Counter()


_default = _Default()


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Duration | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: object | None = None,
    device_id: torch.device | int | None = None,
    _ranks: Sequence[int] | None = None,
    *,
    register_with_torch: bool | None = None,
) -> None:
    """Make this process a rank of a job; afterwards the functions of `disttrain` work on its default group.

    Args:    backend      leave it out: each collective goes to the transport of its tensor's device. Or "gloo", "nccl",
                          "cpu:gloo,cuda:nccl", or "fake": then this process is rank 0 (or `rank`) of `world_size`, and
                          neither a store is needed nor another rank waited for.
             init_method  "env://" (default; what launchers set; where nobody has set anything, this process is the one
                          rank of a job of its own), or "tcp://host:port" or "file:///path" with
                          `rank` and `world_size`. The file must not exist yet; the last rank to leave removes it.
             timeout      for every collective; a timedelta or seconds.
             store        instead of `init_method`, with `rank` and `world_size`; stays the caller's to close. For
                          another world, wrap it in a PrefixStore or give another `group_name`.
             device_id    the GPU that this rank computes on; default: the one of its local rank.
             _ranks       torch's, for jobs whose ranks are parts of another's: taken where it names none, or all.
             register_with_torch  initialise torch.distributed too, over the same transports, so that what is written
                          for it (DDP, DistributedSampler, ...) finds its default group. Left out: where torch can
                          share them, and has no job of its own. True: else it is an error; connects GPUs and CPUs.
    Raises:  RendezvousError when ranks don't fit together or don't come, StoreError when the store can't be reached,
             GroupError when the process is a rank already.
    Collective: every rank of the job.
    """
    if has_world():
        raise GroupError(
            "init_process_group",
            "this process is a rank already.",
            "Call destroy_process_group first.",
            rank=current_world("init_process_group").rank,
        )
    timeout_s = TIMEOUT_S.read() if timeout is None else seconds("init_process_group", timeout)
    if _ranks and list(_ranks) != list(range(len(_ranks))):
        raise GroupError(
            "init_process_group", f"_ranks={list(_ranks)} is a part of a job.", "Make a group of them by new_group."
        )
    prefix = group_name or "job"
    if backend is not None and not any(kind.has_peers for kind in choose_backends(backend).values()):
        info = rendezvous.rendezvous_alone(rank, world_size)
        opened: Store = HashStore() if store is None else store
    elif store is not None:
        info = rendezvous.find_rendezvous(init_method, rank, world_size, store)
        opened = store
        rendezvous.join(PrefixStore(prefix, store), info, timeout_s)
    else:
        info = rendezvous.find_rendezvous(init_method, rank, world_size, store)
        # A launcher's store outlives a world: each world that its processes have had gets keys of its own there.
        _default.num_inits[info.address] += 1
        prefix = f"round-{info.round}/{prefix}/{_default.num_inits[info.address]}"
        opened = rendezvous.meet(info, prefix, timeout_s)
    world = World(
        PrefixStore(prefix, opened),
        info.rank,
        info.world_size,
        backend=backend,
        timeout_s=timeout_s,
        device=torch.device("cuda", device_id) if isinstance(device_id, int) else device_id,
        options=pg_options,
        owned_store=opened if store is None else None,
    )
    if any(kind.has_peers for kind in world.default_group.backend_classes.values()):
        tell_host(world)
    enter_process_world(world, register_with_torch=register_with_torch)


def enter_process_world(world: World, *, register_with_torch: bool | None = False) -> None:
    """Make this process a rank of `world`, until destroy_process_group, and have its calls recorded.

    `register_with_torch`: as in init_process_group.
    """
    _default.process_world = world
    try:
        world.note_thread_errors()
        if FLIGHT_RECORDER.read():
            # By its name: the recorder lies above this layer, which knows only what `observer.Recorder` says.
            importlib.import_module(_RECORDER).enable(world)
        if world.default_group.asks_witnesses:
            # From the start: other ranks may use a group before this one does.
            world.become_witness()
        if register_with_torch:
            world.default_group.to_torch()
        elif register_with_torch is None:
            # Here: what torch calls stands above worlds.
            from disttrain.process_group.beside.torch_registration import register_if_free

            register_if_free(world.default_group)
    except BaseException:
        destroy_process_group()
        raise


def destroy_process_group(group: ProcessGroup | NonGroupMember | None = None) -> None:
    """Let go of `group`, or of the whole world when it is None or the default group.

    Where another library has initialised torch.distributed, and nobody disttrain, it is torch's group that ends.
    Collectives over Gloo whose handles nobody has kept get five seconds to end; then a warning says how many did not.
    """
    if group is None and (torch_distributed := _torch_alone()) is not None:
        torch_distributed.destroy_process_group()
        return
    world = current_world("destroy_process_group")
    if isinstance(group, NonGroupMember):
        return  # there is nothing of it here
    if group is not None and group is not world.default_group:
        world.destroy_group(resolve_group("destroy_process_group", group))
        return
    world.destroy()
    if _default.thread.world is world:
        _default.thread.world = None
    else:
        _default.process_world = None
        _default.left_torchs = _torchs_default()


@contextmanager
def entered_world(world: World) -> Iterator[World]:
    """Make `world` this thread's own for the time of the block, then let go of it."""
    _default.thread.world = world
    _default.has_thread_worlds = True
    try:
        yield world
    finally:
        if _default.thread.world is world:
            destroy_process_group()


def has_world() -> bool:
    """True when this thread or process is a rank of a world of disttrain's."""
    return (_default.thread.world or _default.process_world) is not None


def _torch_alone() -> Any:
    """torch.distributed, where another library has initialised it, and nobody disttrain before or since; else None."""
    if has_world() or (default := _torchs_default()) is None or default == _default.left_torchs:
        return None
    return torch.distributed


def _torchs_default() -> int | None:
    """The id of torch's default group, if it has one."""
    is_there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return id(torch.distributed.group.WORLD) if is_there else None


def current_world(operation: str = "current_world") -> World:
    """The world of this thread or process; `from_torch`'s, where another library has initialised torch.distributed.

    Raises GroupError before init_process_group.
    """
    world = _default.thread.world or _default.process_world
    if world is None and _torch_alone() is not None:
        # What joins asks here for the current world itself.
        importlib.import_module("disttrain.process_group.beside.interop").from_torch()
        world = _default.process_world
    if world is None:
        raise GroupError(
            operation,
            "this process is not a rank of any job yet.",
            "Call disttrain.init_process_group() first. disttrain-launch starts a script on several ranks.",
        )
    return world


class _Groups:
    """torch's `group` and `GroupMember`: whoever writes `group.WORLD` means the default group."""

    NON_GROUP_MEMBER: Final = NON_GROUP_MEMBER

    @property
    def WORLD(self) -> ProcessGroup | None:  # noqa: N802  torch's name
        """The default group; None before init_process_group, which all that takes a group takes for the same."""
        world = _default.thread.world or _default.process_world
        return None if world is None else world.default_group


group: Final = _Groups()
GroupMember: Final = group


def resolve_group(operation: str, group: object) -> ProcessGroup:
    """The group that a collective is for: the default group for None, ours for one of torch's that has it."""
    if group is None:
        world = (_default.has_thread_worlds and _default.thread.world) or _default.process_world
        return (current_world(operation) if world is None else world).default_group
    # Dynamo, for which a group may be a constant, guards what `type` gives of it, and not what isinstance does.
    if isinstance(group, ProcessGroup):
        return group
    if isinstance(group, NonGroupMember):
        raise GroupError(
            operation,
            "this rank is not a member of the group. (Invalid process group specified)",
            "Call it on members only: new_group returns NON_GROUP_MEMBER to the others.",
            rank=current_world(operation).rank,
        )
    return _known_to_torch(operation, group)


def called_group(operation: str, group: object) -> ProcessGroup | None:
    """As resolve_group; None, with a warning, on a rank that is not a member: its call does nothing, as torch's."""
    if isinstance(group, NonGroupMember):
        rank = current_world(operation).rank
        reason = f"{operation} on rank {rank} does nothing: this rank is not a member of the group."
        warnings.warn(reason, stacklevel=3)
        return None
    return resolve_group(operation, group)


def _known_to_torch(operation: str, group: object) -> ProcessGroup:
    """The group that torch knows as `group`. Raises GroupError, with the kind of `group`, where there is none."""
    world = current_world(operation)
    for candidate in world.groups:
        if candidate.torch_group is group:
            return candidate
    kind = type(group)
    raise GroupError(
        operation,
        f"the group is a {kind.__module__}.{kind.__qualname__}, and none of this job's.",
        "Make it by disttrain.new_group, or of torch's by disttrain.from_torch.",
        rank=world.rank,
    )


def is_available() -> bool:
    """True: for scripts that ask torch.distributed the same."""
    return True


def is_initialized() -> bool:
    """True between init_process_group and destroy_process_group, torch.distributed's among them."""
    return (_default.thread.world or _default.process_world or _torch_alone()) is not None


def get_rank(group: ProcessGroup | NonGroupMember | None = None) -> int:
    """This process's rank in the group; -1 when it is not a member."""
    if group is None and (torch_distributed := _torch_alone()) is not None:
        return int(torch_distributed.get_rank())  # without joining: one rank alone may ask
    return -1 if isinstance(group, NonGroupMember) else resolve_group("get_rank", group).group_rank


def get_world_size(group: ProcessGroup | NonGroupMember | None = None) -> int:
    """Number of ranks in the group; -1 when this process is not a member."""
    if group is None and (torch_distributed := _torch_alone()) is not None:
        return int(torch_distributed.get_world_size())
    return -1 if isinstance(group, NonGroupMember) else resolve_group("get_world_size", group).group_size


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: Duration | None = None,
    backend: str | None = None,
    pg_options: object | None = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: torch.device | None = None,
    *,
    sort_ranks: bool = True,
) -> ProcessGroup | NonGroupMember:
    """A group of the given global ranks (None: all of them), in ascending order, or as given without `sort_ranks`.

    Unlike torch's it costs no communication, needs no call from ranks that are not members, and no global order. So
    `use_local_synchronization` changes nothing; nor do `group_desc`, since groups are named by their ranks, and
    `device_id`: each device is connected when it is first used.
    Returns: the group, or NON_GROUP_MEMBER on ranks that are not in it.
    """
    timeout_s = None if timeout is None else seconds("new_group", timeout)
    world = current_world("new_group")
    with arguments_of("new_group", world.rank, "Give the ranks as a list of numbers."):
        members = None if ranks is None else Ranks.of(ranks)
        if members is not None and sort_ranks and not members.ascends:
            members = Ranks.of(sorted(members))
        return world.new_group(members, timeout_s, backend, pg_options)


__all__ = [
    "GroupMember",
    "NON_GROUP_MEMBER",
    "current_world",
    "destroy_process_group",
    "enter_process_world",
    "entered_world",
    "get_rank",
    "get_world_size",
    "group",
    "init_process_group",
    "is_available",
    "is_initialized",
    "new_group",
    "resolve_group",
]
