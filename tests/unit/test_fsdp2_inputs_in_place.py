"""A module may write to its input, as a plain one may."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from disttrain.fsdp2 import fully_shard
from disttrain.testing import run_threads


class WritesToItsInput(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(2.0)) + x


def test_a_module_may_write_to_its_input() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 3), WritesToItsInput(3, 3), nn.Linear(3, 2)).double()
    sharded = copy.deepcopy(plain)
    x = torch.randn(4, 3, dtype=torch.float64)

    def main() -> None:
        for layer in sharded:
            fully_shard(layer)
        fully_shard(sharded)
        for _ in range(2):
            for model in (plain, sharded):
                model(x).square().sum().backward()
        for parameter, other in zip(sharded.parameters(), plain.parameters(), strict=True):
            grad: Any = parameter.grad
            torch.testing.assert_close(grad.full_tensor(), other.grad, rtol=1e-12, atol=1e-12)

    run_threads(1, main)
