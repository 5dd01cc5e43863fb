"""How shards lie in a flat buffer, and in which order modules are expected to run."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from disttrain.fsdp2.machine.order import ExecutionOrder
from disttrain.fsdp2.params.flat import plan_flat
from disttrain.kernels._torch import chunk_cat

shapes = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4)


@given(shapes, st.integers(1, 4))
def test_the_buffers_of_all_ranks_hold_every_row_once(shapes: list[tuple[int, ...]], num_shards: int) -> None:
    plan = plan_flat(shapes, num_shards)
    assert sum(plan.split_sizes) == plan.shard_numel
    tensors = [torch.randn(shape) for shape in shapes]
    buffers = torch.empty(num_shards, plan.shard_numel)
    chunk_cat(tensors, num_shards, out=buffers)
    for tensor, slot in zip(tensors, plan.slots, strict=True):
        columns = buffers[:, slot.offset : slot.offset + slot.padded_numel]
        rows = columns.reshape(num_shards * slot.padded_rows, math.prod(slot.shape[1:]))
        assert torch.equal(rows[: slot.shape[0]].reshape(slot.shape), tensor)
        assert not rows[slot.shape[0] :].any()


def visit_all(order: ExecutionOrder[str], members: str) -> list[str | None]:
    order.begin()
    return [order.visit(member) for member in members]


def test_the_first_iteration_is_learnt_and_the_next_foretold() -> None:
    order: ExecutionOrder[str] = ExecutionOrder()
    assert visit_all(order, "rab") == [None, None, None]
    assert visit_all(order, "rab") == ["a", "b", None]
    assert [order.backward_from(member) for member in "bar"] == ["a", "r", None]


def test_leaving_the_path_stops_foretelling_until_it_is_learnt_anew() -> None:
    order: ExecutionOrder[str] = ExecutionOrder()
    visit_all(order, "rab")
    assert visit_all(order, "rbab") == ["a", None, None, None]
    assert visit_all(order, "rbab") == ["b", "a", "b", None]
    assert order.backward_from("x") is None
