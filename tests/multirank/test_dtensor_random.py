"""Random numbers of DTensors are those of a single process with the same seed, for every layout, mesh and generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import disttrain
from disttrain.dtensor import DTensor, Replicate, Shard, distribute_tensor, rand, randn
from disttrain.testing.pytest_plugin import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule")

Draw = Callable[[torch.Tensor, torch.Generator | None], Any]


def given(generator: torch.Generator | None) -> dict[str, torch.Generator]:
    """For functions that take a generator, but no None in its place."""
    return {} if generator is None else {"generator": generator}


WITH_GENERATOR: dict[str, Draw] = {
    "normal_": lambda x, g: x.clone().normal_(1, 2, generator=g),
    "uniform_": lambda x, g: x.clone().uniform_(-1, 1, generator=g),
    "exponential_": lambda x, g: x.clone().exponential_(2, generator=g),
    "log_normal_": lambda x, g: x.clone().log_normal_(generator=g),
    "cauchy_": lambda x, g: x.clone().cauchy_(generator=g),
    "geometric_": lambda x, g: x.clone().geometric_(0.3, generator=g),
    "random_": lambda x, g: x.clone().random_(9, generator=g),
    "bernoulli": lambda x, g: torch.bernoulli(x, generator=g),
    "bernoulli_": lambda x, g: x.clone().bernoulli_(0.4, generator=g),
    "bernoulli_ of probabilities": lambda x, g: x.clone().bernoulli_(x, generator=g),
    "normal": lambda x, g: torch.normal(x, x + 1, generator=g),
    "normal of means": lambda x, g: torch.normal(x, 2.0, generator=g),
    "poisson": lambda x, g: torch.poisson(x * 5, generator=g),
    "binomial": lambda x, g: torch.binomial(torch.full_like(x, 9), x, generator=g),
    "multinomial": lambda x, g: torch.multinomial(x + 0.1, 2, generator=g),
    "rand_like": lambda x, g: torch.rand_like(x, **given(g)),
    "randn_like": lambda x, g: torch.randn_like(x, **given(g)),
    "randint_like": lambda x, g: torch.randint_like(x, 9, **given(g)),
    "rrelu": lambda x, g: torch.rrelu(x - 0.5, training=True, generator=g),
    "trunc_normal_": lambda x, g: torch.nn.init.trunc_normal_(x.clone(), generator=g),
    "orthogonal_": lambda x, g: torch.nn.init.orthogonal_(x.clone(), generator=g),
    "kaiming_normal_": lambda x, g: torch.nn.init.kaiming_normal_(x.clone(), generator=g),
}
WITHOUT: dict[str, Draw] = {
    "dropout": lambda x, _: functional.dropout(x, 0.3),
    "dropout_": lambda x, _: functional.dropout(x.clone(), 0.3, inplace=True),
    "dropout1d": lambda x, _: functional.dropout1d(x, 0.3),
    "alpha_dropout": lambda x, _: functional.alpha_dropout(x, 0.3, training=True),
    "feature_alpha_dropout": lambda x, _: functional.feature_alpha_dropout(x, 0.3, training=True),
    "gumbel_softmax": lambda x, _: functional.gumbel_softmax(x, hard=True),
}


def mesh_of_all() -> disttrain.DeviceMesh:
    world_size = disttrain.get_world_size()
    return disttrain.init_device_mesh("cpu", (world_size,) if world_size < 4 else (2, 2))


def layouts(mesh: disttrain.DeviceMesh) -> list[list[Any]]:
    if mesh.ndim == 1:
        return [[Shard(0)], [Shard(1)], [Replicate()]]
    return [[Shard(0), Shard(0)], [Shard(1), Replicate()]]


def drawn_twice(draw: Draw, x: torch.Tensor, generator: torch.Generator | None) -> list[torch.Tensor]:
    """What `draw` returns after other draws, and again after a new seed, with the number that comes next."""
    results = []
    for seed in (11, 12):
        if generator is None:
            torch.manual_seed(seed)
        else:
            generator.manual_seed(seed)
        for num_before in (0, 3):
            torch.rand(num_before, generator=generator)
            results.append(draw(x, generator))
            results.append(torch.rand(1, generator=generator))
    return results


@pytest.mark.sweep(1)
@on_ranks(3, 4)
def test_draws() -> None:
    mesh = mesh_of_all()
    x = torch.rand(7, 4, generator=torch.Generator().manual_seed(0))
    draws = [
        (name, draw, generator) for name, draw in WITH_GENERATOR.items() for generator in (None, torch.Generator())
    ]
    draws += [(name, draw, None) for name, draw in WITHOUT.items()]
    for name, draw, generator in draws:
        expected = drawn_twice(draw, x, generator)
        for placements in layouts(mesh):
            tensor = distribute_tensor(x, mesh, placements, src_data_rank=None)
            found = drawn_twice(draw, tensor, generator)
            for place, (one, other) in enumerate(zip(found, expected, strict=True)):
                whole = one.full_tensor() if isinstance(one, DTensor) else one
                assert torch.equal(whole, other), f"{name}, {placements} on {mesh.shape}, result {place}"


@on_ranks(2, 4)
def test_factories_draw_between_other_draws() -> None:
    mesh = mesh_of_all()
    placements = [Shard(0)] * mesh.ndim
    for make, plain in ((rand, torch.rand), (randn, torch.randn)):
        torch.manual_seed(3)
        expected = [plain(7, 4), torch.rand(3), plain(5), plain(2, 1, 3)]
        torch.manual_seed(3)
        first = make(7, 4, device_mesh=mesh, placements=placements)
        between = torch.rand(3)
        others = [make(*shape, device_mesh=mesh, placements=placements) for shape in ((5,), (2, 1, 3))]
        found = [first.full_tensor(), between, *(other.full_tensor() for other in others)]
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
