"""The plan of an exchange loses no row and duplicates none, whatever the routing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disttrain.experts.exchange.expert_cut import ExpertCut
from tests.cases.exchange_plan import ExchangePlan


@st.composite
def routings(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """Experts and, by rank, what its assignments chose; some name no expert, some ranks have no tokens."""
    num_experts = draw(st.integers(1, 9))
    chosen = st.lists(st.integers(-1, num_experts), max_size=12)
    return num_experts, draw(st.lists(chosen, min_size=1, max_size=5))


@given(st.integers(1, 40), st.integers(1, 12))
def test_each_expert_lies_on_one_rank(num_experts: int, num_ranks: int) -> None:
    cut = ExpertCut(num_experts, num_ranks)
    assert [expert for rank in range(num_ranks) for expert in cut.experts_of(rank)] == list(range(num_experts))


@given(routings())
def test_no_row_is_lost_and_none_is_twice(routing: tuple[int, list[list[int]]]) -> None:
    num_experts, experts = routing
    plan = ExchangePlan.of(experts, num_experts)
    num_ranks = len(experts)
    arrived: list[dict[int, tuple[int, int, int]]] = [{} for _ in range(num_ranks)]
    for source, chosen in enumerate(experts):
        # The rows in the order in which they are sent, as (source, assignment, expert).
        rows = sorted((expert, number) for number, expert in enumerate(chosen) if 0 <= expert < num_experts)
        landings = plan.landings(source)
        assert len(landings) == len(rows) == sum(plan.sent(source))
        for (expert, number), landing in zip(rows, landings, strict=True):
            assert landing.row not in arrived[landing.rank], "two rows in one place"
            assert expert in plan.cut.experts_of(landing.rank)
            arrived[landing.rank][landing.row] = (source, number, expert)
    for rank, rows_here in enumerate(arrived):
        assert sorted(rows_here) == list(range(sum(plan.received(rank))))
        # Sorted by expert, then by source, then as they were.
        order = [rows_here[row] for row in sorted(rows_here)]
        assert order == sorted(order, key=lambda row: (row[2], row[0], row[1]))
        begin = 0
        for expert, end in zip(plan.cut.experts_of(rank), plan.ends(rank), strict=True):
            assert all(rows_here[row][2] == expert for row in range(begin, end))
            begin = end
        assert begin == len(rows_here)
        assert sorted(plan.arrival_order(rank)) == list(range(len(rows_here)))


@given(routings())
def test_what_one_sends_is_what_the_other_receives(routing: tuple[int, list[list[int]]]) -> None:
    num_experts, experts = routing
    plan = ExchangePlan.of(experts, num_experts)
    ranks = range(len(experts))
    assert [[plan.sent(source)[rank] for source in ranks] for rank in ranks] == [plan.received(rank) for rank in ranks]
