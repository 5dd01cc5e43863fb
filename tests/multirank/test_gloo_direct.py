"""Small collectives over Gloo wait for the network once, and add up in the order of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate

import pytest
import torch

import disttrain
from disttrain import ReduceOp
from disttrain.errors import CollectiveMismatchError
from disttrain.process_group.backends import gloo, gloo_direct
from disttrain.testing.pytest_plugin import on_ranks
from tests.surroundings.hosts_of_groups import set_spans_hosts


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
        lambda: disttrain.reduce_scatter(part, [*whole.chunk(num_ranks)]),
    ]
    for call in direct:
        assert operations(call) == ["gloo:all_to_all"]
    # What is large has sizes beside it.
    gathered = torch.empty(num_ranks * large.numel())
    assert operations(lambda: disttrain.reduce_scatter_tensor(large, gathered)) == ["gloo:all_to_all"] * 2
    assert "gloo:all_gather" in operations(lambda: disttrain.all_gather_into_tensor(gathered, large))
    assert "gloo:all_to_all" not in operations(lambda: disttrain.all_reduce(large))


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


@on_ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64])
def test_small_all_reduces_between_hosts_are_those_within_one(
    dtype: torch.dtype,
) -> None:
    ops = [
        ReduceOp.SUM,
        *([] if dtype.is_complex else [ReduceOp.MAX]),
        *([ReduceOp.AVG] if dtype.is_floating_point else []),
    ]
    inner, outer = disttrain.new_group(), disttrain.new_group()
    assert isinstance(inner, disttrain.ProcessGroup)
    assert isinstance(outer, disttrain.ProcessGroup)
    set_spans_hosts(between=(outer,))
    disttrain.barrier(outer)  # connects
    for op in ops:
        # Whole numbers, whose sums do not depend on an order.
        values = torch.arange(-3, 9).view(3, 4).add(disttrain.get_rank()).to(dtype)
        expected = values.clone()
        disttrain.all_reduce(expected, op, inner)
        assert operations(lambda: disttrain.all_reduce(values, op, outer)) == ["gloo:all_to_all"]  # noqa: B023  called at once
        assert torch.equal(values, expected)


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
    with torch.device("meta"):
        for gathered in (values[:2], weight[:2], result[:2]):
            disttrain.all_gather_into_tensor(gathered, weight[2:])
            assert gathered.tolist() == [2.0] * 2


@on_ranks(2, 3)
@pytest.mark.parametrize("num_elements", [0, 1, 7, 2**17])
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex128])
def test_every_dtype_and_size_comes_whole(num_elements: int, dtype: torch.dtype) -> None:
    rank, num_ranks = disttrain.get_rank(), disttrain.get_world_size()
    part = torch.full((num_elements,), rank).to(dtype)
    whole, listed = torch.zeros(2, num_ranks * num_elements).to(dtype)
    disttrain.all_gather_into_tensor(whole, part)
    disttrain.all_gather([*listed.chunk(num_ranks)], part)
    expected = torch.arange(num_ranks).repeat_interleave(num_elements).to(dtype)
    assert torch.equal(whole.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(listed.view(torch.uint8), expected.view(torch.uint8))


@on_ranks(2, 3)
@pytest.mark.parametrize("sizes", [(0, 400), (399, 400), (400, 10**6), (900_000, 10**6)])
@pytest.mark.parametrize(
    "name", ["reduce_scatter_tensor", "reduce_scatter", "all_gather_into_tensor", "all_gather", "all_reduce"]
)
def test_other_sizes_are_errors_on_all_ranks(name: str, sizes: tuple[int, int]) -> None:
    """Also on those that have room for more than the others send, and whichever message comes first."""
    num_ranks = disttrain.get_world_size()
    for odd_rank in (0, num_ranks - 1):
        num_elements = sizes[disttrain.get_rank() != odd_rank]
        part, whole = torch.ones(num_elements), torch.ones(num_ranks * num_elements)
        parts = [*whole.view(num_ranks, -1).unbind()]
        tensors: dict[str, tuple[object, ...]] = {
            "reduce_scatter_tensor": (part, whole),
            "reduce_scatter": (part, parts),
            "all_gather_into_tensor": (whole, part),
            "all_gather": (parts, part),
            "all_reduce": (part,),
        }
        group = disttrain.new_group()
        assert isinstance(group, disttrain.ProcessGroup)
        set_spans_hosts(between=(group,))
        disttrain.barrier(group)
        with pytest.raises(CollectiveMismatchError, match="sizes: "):
            getattr(disttrain, name)(*tensors[name], group=group)
        disttrain.barrier()


@on_ranks(2)
def test_what_fails_in_a_group_that_has_ended_is_no_news_for_others() -> None:
    """Gloo's thread has failed before its group has ended on this rank, by what another rank has found."""
    rank = disttrain.get_rank()
    for _ in range(3):
        group = disttrain.new_group()
        assert isinstance(group, disttrain.ProcessGroup)
        disttrain.barrier(group)
        num_elements = 4 if rank == 0 else 400
        with pytest.raises(CollectiveMismatchError):
            disttrain.all_gather_into_tensor(torch.ones(2 * num_elements), torch.ones(num_elements), group)
    if rank == 0:
        time.sleep(1)
    disttrain.barrier()


@on_ranks(1, 3)
def test_lists_go_joined_where_gloo_takes_none() -> None:
    """As with torch 2.11: also lists of equal parts, and those that are not waited for at once."""
    rank, num_ranks = disttrain.get_rank(), disttrain.get_world_size()
    inputs = [values_of(num_ranks * rank + other, 4, 3) for other in range(num_ranks)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gloo, "_TAKES_LISTS", False)
        for async_op in (False, True):
            outputs = [torch.empty(4, 3) for _ in range(num_ranks)]
            work = disttrain.all_to_all(outputs, inputs, async_op=async_op)
            if work is not None:
                work.wait()
            for other, output in enumerate(outputs):
                assert torch.equal(output, values_of(num_ranks * other + rank, 4, 3))
