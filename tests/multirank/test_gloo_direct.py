"""Small collectives over Gloo wait for the network once, and add up in the order of ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch

import disttrain
from disttrain import ReduceOp
from disttrain.process_group.backends import gloo_direct
from disttrain.testing.pytest_plugin import on_ranks


def operations(call: Callable[[], object]) -> list[str]:
    """What Gloo does meanwhile, by the profiler's names."""
    with torch.profiler.profile() as profile:
        call()
    return [event.name for event in profile.events() if event.name.startswith("gloo:")]


def values_of(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


@on_ranks(2, 3, 4)
def test_what_is_small_goes_straight_to_all() -> None:
    num_ranks = disttrain.get_world_size()
    disttrain.barrier()  # connects
    part, whole = torch.ones(5), torch.empty(5 * num_ranks)
    large = torch.ones(gloo_direct.GATHERED_BYTES)
    direct = [
        lambda: disttrain.all_gather_into_tensor(whole, part),
        lambda: disttrain.all_gather([*whole.chunk(num_ranks)], part),
        lambda: disttrain.reduce_scatter_tensor(part, whole),
        lambda: disttrain.reduce_scatter_tensor(large, large.repeat(num_ranks)),
        lambda: disttrain.reduce_scatter(part, [*whole.chunk(num_ranks)]),
    ]
    for call in direct:
        assert operations(call) == ["gloo:all_to_all"]
    gathered = torch.empty(num_ranks * large.numel())
    for call in (lambda: disttrain.all_reduce(large), lambda: disttrain.all_gather_into_tensor(gathered, large)):
        assert "gloo:all_to_all" not in operations(call)


@on_ranks(3, 4)
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", ["SUM", "AVG", "MAX"])
def test_sums_are_in_the_order_of_ranks(name: str, op: str) -> None:
    dtype, reduction = getattr(torch, name), getattr(ReduceOp, op)
    rank, num_ranks = disttrain.get_rank(), disttrain.get_world_size()
    every = [values_of(each, num_ranks, 33, dtype=dtype) for each in range(num_ranks)]
    fold = torch.maximum if op == "MAX" else torch.add
    *_, total = accumulate((values.float() for values in every), fold)
    expected = (total / num_ranks if op == "AVG" else total).to(dtype)
    reduced, listed = torch.empty(2, 33, dtype=dtype)
    disttrain.reduce_scatter_tensor(reduced, every[rank], reduction)
    disttrain.reduce_scatter(listed, [*every[rank]], reduction)
    assert torch.equal(reduced, expected[rank])
    assert torch.equal(listed, expected[rank])


@on_ranks(3)
def test_who_only_sees_that_it_has_ended_has_the_sum() -> None:
    value = torch.empty(1)
    work = disttrain.reduce_scatter_tensor(value, torch.ones(3), async_op=True)
    assert work is not None
    while not work.is_completed():
        pass
    assert value.tolist() == [3.0]


@on_ranks(2)
def test_autograd_does_not_see_it() -> None:
    """As where C++ writes: parameters may be summed, and what backward needs; also what was made for inference."""
    weight = torch.nn.Parameter(torch.ones(3))
    result = weight.exp()
    version = result._version
    disttrain.reduce_scatter_tensor(result, torch.ones(6))
    assert result._version == version
    disttrain.reduce_scatter_tensor(weight, torch.ones(6))
    assert weight.tolist() == [2.0] * 3
    with torch.inference_mode():
        values = torch.ones(3)
    disttrain.reduce_scatter_tensor(values, torch.ones(6))
    assert values.tolist() == [2.0] * 3
