"""disttrain: train models over many processes, GPUs and machines.

This is the front door: process groups, collectives and meshes, under torch.distributed's names. The parts are imported
from their own packages (`disttrain.dtensor`, `disttrain.fsdp2`, `disttrain.checkpoint`, ...).

Importing `disttrain` loads no torch: each name below is fetched from its package when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from disttrain.lazy_names import lazily
from disttrain.version import __version__ as __version__

if TYPE_CHECKING:
    from disttrain.errors import DistBackendError as DistBackendError
    from disttrain.errors import DistError as DistError
    from disttrain.errors import DistNetworkError as DistNetworkError
    from disttrain.errors import DistStoreError as DistStoreError
    from disttrain.errors import QueueEmptyError as QueueEmptyError
    from disttrain.mesh import DeviceMesh as DeviceMesh
    from disttrain.mesh import init_device_mesh as init_device_mesh
    from disttrain.process_group import *  # noqa: F403
    from disttrain.process_group.current import GroupMember as GroupMember
    from disttrain.process_group.current import group as group
    from disttrain.process_group.joining.meeting import rendezvous as rendezvous
    from disttrain.reports import report as report
    from disttrain.store import FileStore as FileStore
    from disttrain.store import HashStore as HashStore
    from disttrain.store import PrefixStore as PrefixStore
    from disttrain.store import Store as Store
    from disttrain.store import TCPStore as TCPStore

_HOMES = {
    "process_group": (
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
        "scatter",
        "scatter_object_list",
        "send",
        "send_object_list",
        "split_group",
        "to_torch",
    ),
    # Not the package's: there they are the names of modules.
    "process_group.current": ("GroupMember", "group"),
    "process_group.joining.meeting": ("rendezvous",),
    "mesh": ("DeviceMesh", "init_device_mesh"),
    "errors": ("DistBackendError", "DistError", "DistNetworkError", "DistStoreError", "QueueEmptyError"),
    "reports": ("report",),
    "store": ("FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(["__version__", *_HOME_OF])  # noqa: PLE0605

_OF_TORCH = {
    "_all_gather_base": "process_group.calls.collectives",
    "_coalescing_manager": "process_group.calls.coalescing",
    "_get_all_pg_configs": "process_group.watching.questions",
    "_get_default_group": "process_group.watching.questions",
    "_get_default_store": "process_group.watching.questions",
    "_get_group_size": "process_group.watching.questions",
    "_get_object_coll_device": "process_group.watching.questions",
    "_get_pg_config": "process_group.watching.questions",
    "_get_pg_default_device": "process_group.watching.questions",
    "_get_process_group_name": "process_group.watching.questions",
    "_get_process_group_store": "process_group.watching.questions",
    "_rank_not_in_group": "process_group.watching.questions",
    "_reduce_scatter_base": "process_group.calls.collectives",
    "_resolve_process_group": "process_group.watching.questions",
    "_set_pg_timeout": "process_group.watching.questions",
}
"""torch's private names that programs call."""

__getattr__, __dir__ = lazily(__name__, {**_HOME_OF, **_OF_TORCH})
