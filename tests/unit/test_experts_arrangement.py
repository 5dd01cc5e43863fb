"""The order of rows that have come is that of the plan."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from disttrain.experts.exchange.arrangement import arrange
from disttrain.experts.exchange.plan import ExchangePlan

ROUTINGS = st.integers(1, 7).flatmap(
    lambda num_experts: st.tuples(
        st.just(num_experts), st.lists(st.lists(st.integers(0, num_experts - 1), max_size=12), min_size=1, max_size=5)
    )
)


@given(ROUTINGS)
def test_it_is_the_plans(routing: tuple[int, list[list[int]]]) -> None:
    num_experts, experts = routing
    plan = ExchangePlan.of(experts, num_experts)
    for rank in range(len(experts)):
        counts = torch.tensor([plan.block(source, rank) for source in range(len(experts))], dtype=torch.int64)
        arranged = arrange(counts.view(len(experts), -1), sum(plan.received(rank)))
        assert arranged.order.tolist() == plan.arrival_order(rank)
        assert arranged.ends.tolist() == plan.ends(rank)
        assert arranged.slots[arranged.order].tolist() == list(range(len(arranged.order)))
