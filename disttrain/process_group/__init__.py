"""Process groups and dispatchable collectives: which rank of which job this is, and how tensors move among ranks."""

from __future__ import annotations

from disttrain.process_group._c10d import ReduceOp, premul_sum
from disttrain.process_group.backends.fabric import Fabric
from disttrain.process_group.coalescing import coalescing_manager
from disttrain.process_group.collectives import (
    all_gather_into_tensor,
    all_reduce,
    barrier,
    broadcast,
    reduce,
    reduce_scatter_tensor,
)
from disttrain.process_group.current import (
    current_world,
    destroy_process_group,
    entered_world,
    get_backend,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    init_process_group,
    is_available,
    is_initialized,
    new_group,
)
from disttrain.process_group.group import ProcessGroup
from disttrain.process_group.list_collectives import (
    all_gather,
    all_to_all,
    all_to_all_single,
    gather,
    reduce_scatter,
    scatter,
)
from disttrain.process_group.observer import Call, Observer
from disttrain.process_group.point_to_point import P2POp, batch_isend_irecv, irecv, isend, recv, send
from disttrain.process_group.work import Work
from disttrain.process_group.world import NON_GROUP_MEMBER, World

__all__ = [
    "Call",
    "Fabric",
    "NON_GROUP_MEMBER",
    "Observer",
    "P2POp",
    "ProcessGroup",
    "ReduceOp",
    "Work",
    "World",
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "coalescing_manager",
    "current_world",
    "destroy_process_group",
    "entered_world",
    "gather",
    "get_backend",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "new_group",
    "premul_sum",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]
