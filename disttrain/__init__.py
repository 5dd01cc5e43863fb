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
    from disttrain.mesh import DeviceMesh as DeviceMesh
    from disttrain.mesh import init_device_mesh as init_device_mesh
    from disttrain.process_group import *  # noqa: F403
    from disttrain.process_group.current import group as group
    from disttrain.reports import report as report

_HOMES = {
    "process_group": (
        "Backend",
        "Call",
        "CompletedWork",
        "Fabric",
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
        "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced",
        "all_gather_object",
        "all_gather_single",
        "all_reduce",
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
        "get_global_rank",
        "get_group_rank",
        "get_node_local_rank",
        "get_process_group_ranks",
        "get_rank",
        "get_world_size",
        "init_process_group",
        "irecv",
        "is_available",
        "is_initialized",
        "isend",
        "monitored_barrier",
        "new_group",
        "new_subgroups",
        "new_subgroups_by_enumeration",
        "premul_sum",
        "recv",
        "recv_object_list",
        "reduce",
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
    ),
    # Not the package's: there it is the name of a module.
    "process_group.current": ("group",),
    "mesh": ("DeviceMesh", "init_device_mesh"),
    "reports": ("report",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(["__version__", *_HOME_OF])  # noqa: PLE0605

__getattr__, __dir__ = lazily(__name__, _HOME_OF)
