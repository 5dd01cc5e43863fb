"""DTensor: tensors sharded over a mesh, with torch.distributed.tensor's names."""

from __future__ import annotations

from disttrain.dtensor.creation import empty, full, ones, rand, randn, zeros
from disttrain.dtensor.dtensor import DTensor
from disttrain.dtensor.factories import distribute_tensor
from disttrain.dtensor.layout import Layout, Spec
from disttrain.dtensor.placement import Partial, Placement, Replicate, Shard, StridedShard
from disttrain.dtensor.replication import implicit_replication
from disttrain.dtensor.shard_sizes import local_shape_and_offset

__all__ = [
    "DTensor",
    "Layout",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "Spec",
    "StridedShard",
    "distribute_tensor",
    "empty",
    "full",
    "implicit_replication",
    "local_shape_and_offset",
    "ones",
    "rand",
    "randn",
    "zeros",
]
