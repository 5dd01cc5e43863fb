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
    from disttrain.notebook import launch as launch
    from disttrain.process_group import *  # noqa: F403
    from disttrain.process_group.current import GroupMember as GroupMember
    from disttrain.process_group.current import group as group
    from disttrain.process_group.joining.meeting import rendezvous as rendezvous
    from disttrain.profiling.profile import profile as profile
    from disttrain.reports import REQUEUE_EXIT_CODE as REQUEUE_EXIT_CODE
    from disttrain.reports import report as report
    from disttrain.store import FileStore as FileStore
    from disttrain.store import HashStore as HashStore
    from disttrain.store import PrefixStore as PrefixStore
    from disttrain.store import Store as Store
    from disttrain.store import TCPStore as TCPStore

_OF_TORCH = {
    "_all_gather_base": "disttrain.process_group.calls.collectives",
    "_coalescing_manager": "disttrain.process_group.calls.coalescing",
    "_get_all_pg_configs": "disttrain.process_group.watching.questions",
    "_get_default_group": "disttrain.process_group.watching.questions",
    "_get_default_store": "disttrain.process_group.watching.questions",
    "_get_group_size": "disttrain.process_group.watching.questions",
    "_get_object_coll_device": "disttrain.process_group.watching.questions",
    "_get_pg_config": "disttrain.process_group.watching.questions",
    "_get_pg_default_device": "disttrain.process_group.watching.questions",
    "_get_process_group_name": "disttrain.process_group.watching.questions",
    "_get_process_group_store": "disttrain.process_group.watching.questions",
    "_rank_not_in_group": "disttrain.process_group.watching.questions",
    "_reduce_scatter_base": "disttrain.process_group.calls.collectives",
    "_resolve_process_group": "disttrain.process_group.watching.questions",
    "_set_pg_timeout": "disttrain.process_group.watching.questions",
}
"""torch's private names that programs call."""

__getattr__, __dir__, __all__ = lazily(__name__, _OF_TORCH)
