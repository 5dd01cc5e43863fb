"""Process groups and dispatchable collectives: which rank of which job this is, and how tensors move among ranks."""

from __future__ import annotations

from disttrain.process_group._c10d import BuiltinCommHookType, DebugLevel, GradBucket, ReduceOp, premul_sum
from disttrain.process_group.availability import (
    get_debug_level,
    get_default_backend_for_device,
    is_backend_available,
    is_gloo_available,
    is_mpi_available,
    is_nccl_available,
    is_torchelastic_launched,
    is_ucc_available,
    is_xccl_available,
)
from disttrain.process_group.backends import Backend, CompletedWork, Membership, register_backend
from disttrain.process_group.backends.fabric import Fabric
from disttrain.process_group.beside.interop import from_torch, to_torch
from disttrain.process_group.calls.coalescing import coalescing_manager
from disttrain.process_group.calls.collectives import (
    all_gather_into_tensor,
    all_gather_single,
    all_reduce,
    barrier,
    broadcast,
    reduce,
    reduce_scatter_single,
    reduce_scatter_tensor,
)
from disttrain.process_group.calls.list_collectives import (
    all_gather,
    all_to_all,
    all_to_all_single,
    gather,
    reduce_scatter,
    scatter,
)
from disttrain.process_group.calls.many import (
    all_gather_coalesced,
    all_gather_into_tensor_coalesced,
    all_reduce_coalesced,
    reduce_scatter_tensor_coalesced,
)
from disttrain.process_group.calls.monitored import monitored_barrier
from disttrain.process_group.calls.objects import (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    recv_object_list,
    scatter_object_list,
    send_object_list,
)
from disttrain.process_group.calls.point_to_point import P2POp, batch_isend_irecv, irecv, isend, recv, send
from disttrain.process_group.calls.stopping import request_stop, stop_requested
from disttrain.process_group.current import (
    current_world,
    destroy_process_group,
    entered_world,
    get_rank,
    get_world_size,
    init_process_group,
    is_available,
    is_initialized,
    new_group,
)
from disttrain.process_group.group import ProcessGroup
from disttrain.process_group.joining.subgroups import (
    abort_process_group,
    new_subgroups,
    new_subgroups_by_enumeration,
    split_group,
)
from disttrain.process_group.watching.counting import count_collectives
from disttrain.process_group.watching.observer import Call, Observer
from disttrain.process_group.watching.questions import (
    get_backend,
    get_backend_config,
    get_global_rank,
    get_group_rank,
    get_node_local_rank,
    get_pg_count,
    get_process_group_ranks,
)
from disttrain.process_group.work import Work
from disttrain.process_group.world import NON_GROUP_MEMBER, World

reduce_op = ReduceOp
"""Its name before torch 1.0."""

__all__ = [
    "Backend",
    "BuiltinCommHookType",
    "Call",
    "CompletedWork",
    "DebugLevel",
    "Fabric",
    "GradBucket",
    "Membership",
    "NON_GROUP_MEMBER",
    "Observer",
    "P2POp",
    "ProcessGroup",
    "ReduceOp",
    "Work",
    "World",
    "abort_process_group",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "coalescing_manager",
    "count_collectives",
    "current_world",
    "destroy_process_group",
    "entered_world",
    "from_torch",
    "gather",
    "gather_object",
    "get_backend",
    "get_backend_config",
    "get_debug_level",
    "get_default_backend_for_device",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_pg_count",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "irecv",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "isend",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "premul_sum",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_op",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "register_backend",
    "request_stop",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "split_group",
    "stop_requested",
    "to_torch",
]
