"""Copies of sharded modules, and parameters without elements; ranks are threads."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from disttrain.dtensor import Replicate, Shard
from disttrain.errors import ShardingError
from disttrain.fsdp2 import fully_shard, register_fsdp_forward_method
from disttrain.testing import run_threads


class Scaled(nn.Module):
    def __init__(self, shape: tuple[int, ...] = (5,)) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale.sum()

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self(x) + self.scale


def test_another_method_of_a_copy_computes_with_the_copys_parameters() -> None:
    def main() -> None:
        model = fully_shard(Scaled())
        register_fsdp_forward_method(model, "generate")
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.scale.mul_(2.0)
        for module, value in ((model, 1.0), (twin, 2.0), (copy.deepcopy(twin), 2.0)):
            assert torch.equal(module.generate(torch.ones(5)), torch.full((5,), 6.0 * value))
            module.generate(torch.ones(5)).sum().backward()
            assert torch.equal(module.scale.grad.full_tensor(), torch.full((5,), 6.0))

    run_threads(2, main)


def test_copied_parameters_have_no_gradients_yet() -> None:
    """As those of a plain module."""

    def main() -> None:
        model = fully_shard(nn.Sequential(Scaled(), Scaled((3,))))
        model[0].scale.tag = ["no decay"]
        model(torch.ones(5)).sum().backward()
        model[0].scale.requires_grad_(False)
        twin = copy.deepcopy(model)
        assert [p.grad for p in twin.parameters()] == [None, None]
        assert all(p.grad is not None for p in model.parameters())
        assert twin[0].scale.tag == ["no decay"]
        assert twin[0].scale.tag is not model[0].scale.tag
        # Once it is trained again, a gradient comes to lie as the parameter does.
        twin[0].scale.requires_grad_(True)
        twin[0].scale.redistribute(placements=[Replicate()]).sum().backward()
        assert twin[0].scale.grad.placements == (Shard(0),)

    run_threads(2, main)


def test_what_has_no_elements_may_be_cut_along_any_dim() -> None:
    def main(dim: int) -> None:
        model = nn.Sequential(Scaled((0, 3)), Scaled((3, 4)))
        fully_shard(model, shard_placement_fn=lambda _: Shard(dim))
        assert model(torch.ones(2)).tolist() == [0.0, 0.0]
        model(torch.ones(2)).sum().backward()
        assert torch.equal(model[1].scale.grad.full_tensor(), torch.zeros(3, 4))
        # As of a plain module: there is a gradient, and nothing in it.
        assert model[0].scale.grad.shape == (0, 3)
        alone = fully_shard(Scaled((0, 3)), shard_placement_fn=lambda _: Shard(dim))
        alone(torch.ones(2)).sum().backward()
        assert alone.scale.grad.full_tensor().shape == (0, 3)

    for dim in (0, 1):
        run_threads(2, main, dim)


@pytest.mark.parametrize("way", [pickle.dumps, lambda model: torch.save(model, io.BytesIO())])
def test_a_sharded_module_is_not_pickled(way: Callable[[nn.Module], Any]) -> None:
    def main() -> None:
        model = nn.Sequential(fully_shard(Scaled()))
        for module in (model, model[0]):
            with pytest.raises(ShardingError, match="this FSDPScaled is sharded: one rank's part of it means nothing"):
                way(module)
        assert torch.equal(copy.copy(model[0])(torch.ones(5)), torch.full((5,), 5.0))
        assert model[0].scale is copy.copy(model[0]).scale

    run_threads(2, main)


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.mark.parametrize("leave_parametrized", [False, True])
def test_parametrizations_of_a_sharded_module_stay(leave_parametrized: bool) -> None:
    def main() -> None:
        model = Scaled()
        parametrize.register_parametrization(model, "scale", Twice())
        fully_shard(model)
        for _ in range(2):
            with pytest.raises(ShardingError, match="'scale' is a parametrized parameter of a sharded module"):
                parametrize.remove_parametrizations(model, "scale", leave_parametrized)
            assert parametrize.is_parametrized(model, "scale")
            assert torch.equal(model(torch.ones(5)), torch.full((5,), 10.0))
        twin = copy.deepcopy(model)
        with pytest.raises(ShardingError, match="remove_parametrizations"):
            parametrize.remove_parametrizations(twin, "scale", leave_parametrized)

    run_threads(2, main)
