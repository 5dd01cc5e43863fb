"""Tensor parallel inside experts: each expert's hidden dim is cut over the ranks of a mesh axis.

These ranks compute all of their tokens together. What each has of the results is summed up once tokens have their own
again, which is k times less than the rows of all experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from disttrain.dtensor import DTensor, Partial, Placement, Replicate, Shard, StridedShard, distribute_tensor
from disttrain.errors import ShardingError
from disttrain.mesh import DeviceMesh


@dataclass(frozen=True, eq=False)
class HiddenCut:
    """The axis that hidden dims are cut over. Its ranks have the same tokens, or with `cuts_tokens` each its part of
    them, as with sequence parallel, all of one size."""

    mesh: DeviceMesh
    cuts_tokens: bool

    def entering(self, tokens: torch.Tensor) -> torch.Tensor:
        """(tokens, ...) of all ranks of the axis; gradients are summed over them. Collective."""
        here = [Shard(0) if self.cuts_tokens else Replicate()]
        whole = DTensor.from_local(tokens, self.mesh, here, run_check=False).redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial()])

    def entering_all(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Tokens, and the indices and weights of their experts."""
        indices = self.entering(indices) if self.cuts_tokens else indices
        return self.entering(x), indices, self.entering(weights)

    def leaving(self, sums: torch.Tensor) -> torch.Tensor:
        """This rank's tokens, of which each rank has computed a part of each. Collective."""
        there = [Shard(0) if self.cuts_tokens else Replicate()]
        return (
            DTensor.from_local(sums, self.mesh, [Partial()], run_check=False).redistribute(placements=there).to_local()
        )


def hidden_placements(*, is_transposed: bool, is_interleaved: bool, is_fused: bool) -> tuple[Placement, Placement]:
    """The cuts of weights into experts, (experts, hidden, width), and of those back; `is_fused`: gate and up in one."""
    into, back = (2, 1) if is_transposed else (1, 2)
    return (StridedShard(into, 2) if is_fused and not is_interleaved else Shard(into)), Shard(back)


def cut_further(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement, src_rank: int | None) -> nn.Parameter:
    """The part of `parameter`, which may lie along another axis already, that is this rank's along that of `mesh`.

    Along the axes of experts and of hidden dims, in this order: the one whose placement cuts dim 0 comes first.
    Collective unless `src_rank`, the rank along the axis whose values count, is None.
    """
    local = parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach()
    part = distribute_tensor(local, mesh, [placement], src_data_rank=src_rank)
    if isinstance(parameter, DTensor):
        parts = [(mesh, placement), (parameter.device_mesh, parameter.placements[0])]
        first, second = parts if placement.cut_dim == 0 else parts[::-1]
        joined = first[0].joined_with(second[0])
        if joined is None:
            raise ShardingError(
                "shard_experts",
                f"experts lie on mesh {parameter.device_mesh.layout}, which cannot be joined with {mesh.layout}.",
                "Make one mesh with named axes, and give each parallelism an axis of its own: mesh['ep'], mesh['tp'].",
                rank=mesh.get_rank(),
            )
        placements = [first[1], second[1]]
        shape, stride = parameter.shape, parameter.stride()
        part = DTensor.from_local(part.to_local(), joined, placements, run_check=False, shape=shape, stride=stride)
    return nn.Parameter(part, requires_grad=parameter.requires_grad)
