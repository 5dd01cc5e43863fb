"""A plain mixture of experts, on one process or over ranks, each of which computes its experts of all tokens."""

from __future__ import annotations

import torch
from torch import nn

from disttrain.dtensor import DTensor, Shard, distribute_tensor
from disttrain.mesh import DeviceMesh
from disttrain.process_group.functional import all_gather_tensor_autograd, reduce_scatter_tensor_autograd


class Experts(nn.Module):
    """Linear layers by token, weighted; `mesh` is the axis that they are cut over, if any."""

    def __init__(self, num_experts: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(num_experts, hidden, dim) * 0.3)
        self.down = nn.Parameter(torch.randn(num_experts, dim, hidden) * 0.3)
        self.mesh: DeviceMesh | None = None

    def cut_over(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        for name in ("up", "down"):
            whole = getattr(self, name).detach()
            setattr(self, name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self.mesh is None:
            return self._computed(x, weights, self.up, self.down)
        rank = self.mesh.get_local_rank()
        assert isinstance(self.up, DTensor)
        assert isinstance(self.down, DTensor)
        up, down = self.up.to_local(), self.down.to_local()
        first = min(-(-len(self.up) // self.mesh.size()) * rank, len(self.up))
        everyones = all_gather_tensor_autograd(torch.cat([x, weights], dim=1), 0, self.mesh)
        x, weights = everyones.split([x.shape[1], weights.shape[1]], dim=1)
        mine = self._computed(x, weights[:, first : first + len(up)], up, down)
        return reduce_scatter_tensor_autograd(mine, "sum", 0, self.mesh)

    def _computed(self, x: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        hidden = torch.einsum("md,ehd->meh", x, up).relu()
        return torch.einsum("me,meh,edh->md", weights, hidden, down)


class ExpertBlock(nn.Module):
    """A norm, a router and experts, with a residual."""

    def __init__(self, num_experts: int = 4, dim: int = 6, hidden: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.experts = Experts(num_experts, dim, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        scores = self.router(normed).softmax(dim=-1)
        chosen = scores.topk(2, dim=-1)
        weights = torch.zeros_like(scores).scatter(-1, chosen.indices, chosen.values)
        return x + self.experts(normed, weights)


def stack(num_experts: int = 4, num_blocks: int = 2, dim: int = 6) -> nn.Sequential:
    """A model of such blocks between linear layers, the same on every rank, in fp64."""
    torch.manual_seed(0)
    blocks = [ExpertBlock(num_experts, dim) for _ in range(num_blocks)]
    return nn.Sequential(nn.Linear(dim, dim), *blocks, nn.Linear(dim, 3)).double()
