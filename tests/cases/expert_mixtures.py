"""Models with mixtures of experts, whose routers have the form of transformers'."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttrain
from disttrain.experts import Experts, MixtureOfExperts
from disttrain.mesh import DeviceMesh
from tests.cases.expert_layers import HIDDEN, INTER


class Router(nn.Module):
    """The form of transformers' routers."""

    def __init__(self, num_experts: int, k: int) -> None:
        super().__init__()
        self.k = k
        self.linear = nn.Linear(HIDDEN, num_experts, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = self.linear(x)
        return logits, *logits.softmax(-1).topk(self.k)


def mixture(num_experts: int = 5, k: int = 2, *, shared: bool = True) -> MixtureOfExperts:
    torch.manual_seed(0)
    router, experts = Router(num_experts, k), Experts(num_experts, HIDDEN, INTER)
    return MixtureOfExperts(router, experts, nn.Linear(HIDDEN, HIDDEN) if shared else None).double()


class Model(nn.Module):
    def __init__(self, *, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([mixture(shared=False), mixture()])
        self.head = nn.Linear(HIDDEN, HIDDEN).double()
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.blocks:
            ran = layer(x) if self.checkpointed is None else checkpoint(layer, x, use_reentrant=self.checkpointed)
            x = x + ran
        return self.head(x)


def ep_mesh() -> DeviceMesh:
    return disttrain.init_device_mesh("cpu", (disttrain.get_world_size(),), mesh_dim_names=("ep",))["ep"]
