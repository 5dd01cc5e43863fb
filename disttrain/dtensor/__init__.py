"""DTensor: tensors sharded over a mesh, with torch.distributed.tensor's names."""

from __future__ import annotations

from disttrain.dtensor.comm_debug import CommDebugMode
from disttrain.dtensor.creation import empty, full, ones, rand, randn, zeros
from disttrain.dtensor.custom_rules import register_sharding
from disttrain.dtensor.dispatch.implicit import implicit_replication
from disttrain.dtensor.dtensor import DTensor
from disttrain.dtensor.factories import distribute_tensor
from disttrain.dtensor.gradients.local_step import use_local_steps
from disttrain.dtensor.local_map import local_map
from disttrain.dtensor.modules import distribute_module
from disttrain.dtensor.rank_comparison import compare_ranks
from disttrain.dtensor.spec.layout import Layout, Spec
from disttrain.dtensor.spec.picture import visualize_sharding
from disttrain.dtensor.spec.placement import Partial, Placement, Replicate, Shard, StridedShard
from disttrain.dtensor.spec.shard_sizes import local_shape_and_offset
from disttrain.lazy_names import answering
from disttrain.mesh import DeviceMesh, init_device_mesh

_StridedShard = StridedShard
"""torch's name for it."""

__all__ = [
    "CommDebugMode",
    "DTensor",
    "DeviceMesh",
    "Layout",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "Spec",
    "StridedShard",
    "compare_ranks",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "full",
    "implicit_replication",
    "init_device_mesh",
    "local_map",
    "local_shape_and_offset",
    "ones",
    "rand",
    "randn",
    "register_sharding",
    "visualize_sharding",
    "zeros",
]

use_local_steps()

__getattr__ = answering(__name__)
