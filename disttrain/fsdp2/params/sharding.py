"""Over which ranks `fully_shard` cuts parameters and keeps copies of them, and how a parameter lies on these."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from disttrain.dtensor import DTensor, Layout, Placement, Replicate, Shard, Spec, StridedShard
from disttrain.dtensor.spec.shard_sizes import num_blocks
from disttrain.errors import ShardingError
from disttrain.mesh import DeviceMesh
from disttrain.mesh.overlap import without
from disttrain.process_group import ProcessGroup


@dataclass(frozen=True)
class Sharding:
    """Parameters are cut along the last axis of `mesh`; along one before it, ranks hold copies (hybrid sharding).

    `num_summed`: the data ranks over which another parallelism has cut these parameters and summed their gradients.
    """

    mesh: DeviceMesh
    num_summed: int = 1

    @classmethod
    def beside(cls, mesh: DeviceMesh, parameter: torch.Tensor, along: DeviceMesh | None = None) -> Sharding:
        """Over the ranks of `mesh` that have the same part of the parameter: where that is a DTensor along axes that
        lie within those of `mesh`, as an expert's is, over the rest of them.

        Args: along  the axis whose ranks have other parameters in the place of this one, which is no DTensor.
        """
        if along is not None:
            return cls(*without(mesh, along, [0]))
        if not isinstance(parameter, DTensor):
            return cls(mesh)
        cut = [axis for axis, placement in enumerate(parameter.placements) if placement.cut_dim is not None]
        return cls(*without(mesh, parameter.device_mesh, cut))

    def __deepcopy__(self, _: object) -> Sharding:
        """Itself: copies of a module lie on the same ranks."""
        return self

    @property
    def num_data_ranks(self) -> int:
        """Ranks over whose data gradients are averaged."""
        return self.mesh.size() * self.num_summed

    @property
    def num_shards(self) -> int:
        """Ranks that a parameter is cut for."""
        return self.mesh.shape[-1]

    @property
    def num_replicas(self) -> int:
        """Ranks that hold the same shard."""
        return self.mesh.shape[0] if self.mesh.ndim == 2 else 1

    @cached_property
    def shard_rank(self) -> int:
        """Returns the index of this rank's shard."""
        return self.mesh.get_local_rank(self.mesh.ndim - 1)

    @cached_property
    def shard_group(self) -> ProcessGroup:
        """The ranks that together hold a parameter once."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    @cached_property
    def shard_mesh(self) -> DeviceMesh:
        """These ranks."""
        return self.mesh if self.mesh.ndim == 1 else DeviceMesh(self.mesh.device_type, self.shard_group.members)

    @cached_property
    def replicate_group(self) -> ProcessGroup | None:
        """The ranks that hold the same shard; None where only this one does."""
        return self.mesh.get_group(0) if self.num_replicas > 1 else None

    def group_after_forward(self, num_ranks: int) -> ProcessGroup:
        """The `num_ranks` neighbours of this rank that together keep a parameter between forward and backward."""
        first = self.shard_rank // num_ranks * num_ranks
        group = self.mesh.world.shared_group(self.shard_group.members[first : first + num_ranks])
        group.axis_name = group.axis_name or self.shard_group.axis_name
        return group

    def spec_of(self, fqn: str, parameter: torch.Tensor, dim: int) -> Spec:
        """Describes how `parameter`, cut along `dim`, lies on the mesh, and on the one of another parallelism where it
        is a DTensor already."""
        if not isinstance(parameter, DTensor):
            return Spec.of(Layout(self.mesh, self._placements(Shard(dim))), tuple(parameter.shape), parameter.dtype)
        spec = parameter._spec
        blocks = 1 if self.num_shards == 1 else self._num_pieces(fqn, spec, dim)
        cut: Placement = Shard(dim) if blocks == 1 else StridedShard(dim, blocks)
        mesh = self._joined_with(fqn, spec.mesh)
        return Spec(Layout(mesh, (*self._placements(cut), *spec.placements)), spec.shape, spec.stride, spec.dtype)

    def dim_to_cut(self, parameter: torch.Tensor) -> int:
        """Chooses the first dim, or of experts the first one that can be cut, evenly if one can be: ranks may have
        different numbers of experts, or fewer than there are ranks to cut for."""
        if self.num_summed == 1 or self.num_shards == 1 or not isinstance(parameter, DTensor):
            return 0
        spec = parameter._spec
        pieces = {dim: _num_pieces(spec, dim) for dim in range(len(spec.shape))}
        possible = {dim: num for dim, num in pieces.items() if isinstance(num, int)}
        even = (dim for dim, num in possible.items() if spec.shape[dim] % (num * self.num_shards) == 0)
        return next(even, next(iter(possible), 0))

    def _num_pieces(self, fqn: str, spec: Spec, dim: int) -> int:
        num_pieces = _num_pieces(spec, dim)
        if isinstance(num_pieces, int):
            return num_pieces
        raise ShardingError(
            "fully_shard",
            f"dim {dim} of parameter {fqn} has {spec.shape[dim]} elements and lies as {spec.layout}: {num_pieces[0]}.",
            f"{num_pieces[1]} another dim by shard_placement_fn.",
            rank=self.mesh.get_rank(),
        )

    def _placements(self, cut: Placement) -> tuple[Placement, ...]:
        return (cut,) if self.mesh.ndim == 1 else (Replicate(), cut)

    def _joined_with(self, fqn: str, other: DeviceMesh) -> DeviceMesh:
        """The mesh of this one's axes and then the other's; both must be slices of one grid."""
        joined = self.mesh.joined_with(other)
        if joined is not None:
            return joined
        raise ShardingError(
            "fully_shard",
            f"parameter {fqn} lies on mesh {other.layout}, which cannot be joined with {self.mesh.layout}.",
            "Make one mesh with named axes, and give each parallelism axes of its own: mesh['dp'], mesh['tp'].",
            rank=self.mesh.get_rank(),
        )


def _num_pieces(spec: Spec, dim: int) -> int | tuple[str, str]:
    """The pieces that another parallelism has cut `dim` into, all of one size and each in one place; or why they are
    not, and a remedy."""
    num_pieces = 1
    # Later axes cut what earlier ones leave, so pieces of several blocks may be taken apart again.
    for size, placement in zip(reversed(spec.mesh.shape), reversed(spec.placements), strict=True):
        if placement.cut_dim != dim:
            continue
        if num_pieces % num_blocks(placement):
            return "a rank's part is pieces of several blocks", "Cut"
        num_pieces *= size
    if spec.shape[dim] % num_pieces:
        return f"{num_pieces} uneven pieces", f"Pad it to a multiple of {num_pieces}, or cut"
    return num_pieces
