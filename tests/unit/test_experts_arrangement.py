"""The order of rows that have come is that of the plan."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from disttrain.experts.exchange.arrangement import arrange
from disttrain.experts.exchange.blocks import Blocks, paths_of
from tests.cases.exchange_plan import ExchangePlan

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


@given(ROUTINGS)
def test_rows_are_written_where_the_plan_has_them_land_and_find_home(routing: tuple[int, list[list[int]]]) -> None:
    num_experts, experts = routing
    plan = ExchangePlan.of(experts, num_experts)
    num_ranks, chunk = len(experts), plan.cut.chunk
    counts = torch.zeros(num_ranks, num_ranks * chunk, dtype=torch.int32)
    counts[:, :num_experts] = torch.tensor(plan.counts)
    paths = [paths_of(counts, plan.cut, rank) for rank in range(num_ranks)]
    home = {}
    for rank, (there, _, ends) in enumerate(paths):
        landings = each_row(there)
        assert landings == plan.landings(rank)
        assert ends.tolist() == plan.ends(rank)
        home.update({landing: (rank, row) for row, landing in enumerate(landings)})
    for rank, (_, back, _) in enumerate(paths):
        assert {(rank, row): landing for row, landing in enumerate(each_row(back))} == {
            at: landing for at, landing in home.items() if at[0] == rank
        }


def each_row(blocks: Blocks) -> list[tuple[int, int]]:
    # A kernel reads them side by side.
    assert all(numbers.is_contiguous() for numbers in blocks)
    rows, begin = [], 0
    for end, target, first in zip(*(numbers.tolist() for numbers in blocks), strict=True):
        rows += [(target, first + row) for row in range(end - begin)]
        begin = end
    return rows
