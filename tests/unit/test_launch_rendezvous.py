"""Nodes become a job, whatever the order they come in, or all learn the same reason why not."""

from __future__ import annotations

import select
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain.errors import StoreTimeoutError
from disttrain.store import HashStore
from disttrain_launch.link import LOST_S, JobLink, Pulse
from disttrain_launch.outcome import Failed, Outcome, Succeeded
from disttrain_launch.rendezvous_state import (
    Begin,
    Command,
    JoinTimeOver,
    Node,
    NodeCame,
    Place,
    Refuse,
    Rendezvous,
    Round,
    Warn,
    name_nodes,
)


def node(rank: int, nodes: int = 3, **changes: object) -> Node:
    same = Node(rank, nodes, 2, "1.0", "run", "digest", f"host-{rank}", f"agent-{rank}")
    return replace(same, **changes)  # type: ignore[arg-type]


def commands_of(*nodes: Node) -> list[Command]:
    machine = Rendezvous(node(0, nodes[0].num_nodes))
    return [command for one in nodes for command in machine.handle(NodeCame(one))]


@given(st.integers(1, 12).flatmap(lambda num_nodes: st.permutations(range(num_nodes))), st.data())
def test_every_order_gives_the_same_round(order: list[int], data: st.DataObject) -> None:
    num_nodes = len(order)
    repeated = data.draw(st.lists(st.sampled_from(order), max_size=3))
    machine = Rendezvous(node(0, num_nodes))
    commands = [command for rank in [*repeated, *order] for command in machine.handle(NodeCame(node(rank, num_nodes)))]
    assert commands == [Begin(Round(0, num_nodes, 2), tuple(f"agent-{rank}" for rank in range(num_nodes)))]
    assert machine.absent == ()
    assert machine.handle(JoinTimeOver(1.0)) == []


@given(st.integers(1, 50), st.integers(1, 9))
def test_places_number_every_rank_once(num_nodes: int, num_local_workers: int) -> None:
    places = [Round(0, num_nodes, num_local_workers).place(node_rank) for node_rank in range(num_nodes)]
    ranks = [place.first_rank + local_rank for place in places for local_rank in range(num_local_workers)]
    assert ranks == list(range(num_nodes * num_local_workers))
    assert places[-1] == Place(num_nodes - 1, ranks[-num_local_workers], num_nodes, len(ranks))


@pytest.mark.parametrize(
    ("misfit", "problem"),
    [
        ({"num_nodes": 4}, "node 1 (host-1) has --nnodes 4, node 0 (host-0) has 3; all nodes need the same."),
        (
            {"num_local_workers": 8},
            "node 1 (host-1) has --nproc-per-node 8, node 0 (host-0) has 2; all nodes need the same.",
        ),
        (
            {"version": "1.1"},
            "node 1 (host-1) has disttrain version 1.1, node 0 (host-0) has 1.0; all nodes need the same.",
        ),
        ({"run_id": "b"}, "node 1 (host-1) has --rdzv-id b, node 0 (host-0) has run; all nodes need the same."),
        ({"node_rank": 3}, "node 3 (host-1) is outside --nnodes 3."),
        ({"node_rank": 0}, "--node-rank 0 was given twice: host-0 and host-1."),
    ],
)
def test_a_misfit_is_named(misfit: dict[str, object], problem: str) -> None:
    (refusal,) = commands_of(node(0), node(1, **misfit))
    assert isinstance(refusal, Refuse)
    assert refusal.problem == problem
    assert refusal.remedy


def test_after_a_refusal_nothing_more_is_said() -> None:
    machine = Rendezvous(node(0))
    machine.handle(NodeCame(node(1, version="2")))
    assert machine.handle(NodeCame(node(0))) == []
    assert machine.handle(JoinTimeOver(1.0)) == []


def test_the_absent_are_named_when_time_is_up() -> None:
    machine = Rendezvous(node(0))
    machine.handle(NodeCame(node(0)))
    machine.handle(NodeCame(node(2)))
    assert machine.absent == (1,)
    (refusal,) = machine.handle(JoinTimeOver(5.0))
    assert isinstance(refusal, Refuse)
    assert refusal.problem == "node 1 did not come within 5 s; nodes 0, 2 did."


def test_other_arguments_are_only_worth_a_warning() -> None:
    warning, begin = commands_of(node(0, 2), node(1, 2, digest="other"))
    assert warning == Warn("node 1 (host-1) runs another script or other arguments than node 0 (host-0).")
    assert isinstance(begin, Begin)


def test_ten_thousand_nodes_in_one_process() -> None:
    num_nodes = 10_000
    machine = Rendezvous(node(0, num_nodes))
    commands = [machine.handle(NodeCame(node(rank, num_nodes))) for rank in reversed(range(num_nodes))]
    assert [len(answer) for answer in commands] == [0] * (num_nodes - 1) + [1]


def test_many_nodes_are_named_shortly() -> None:
    assert name_nodes((3,)) == "node 3"
    assert name_nodes(tuple(range(20)), max_shown=3) == "nodes 0, 1, 2 and 17 more"


def test_a_silent_node_is_noticed_by_its_beat() -> None:
    pulse = Pulse(num_nodes=3, now_s=0.0)
    assert pulse.silent([b"1", b"1", b"1"], 1.0) == ()
    assert pulse.silent([b"2", b"1", b"2"], 1.0 + LOST_S / 2) == ()
    assert pulse.silent([b"3", b"1", b"2"], 1.0 + LOST_S) == (1,)
    assert pulse.silent([b"3", b"2", b"2"], 1.0 + LOST_S * 1.5) == (2,)


class SlowStore(HashStore):
    """Does what it is asked, but says so too late: each kind of write, the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.late = {"set", "compare_set"}

    def set(self, key: str, value: bytes | str) -> None:
        super().set(key, value)
        self._answer_late("set")

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        value = super().compare_set(key, expected, desired)
        self._answer_late("compare_set")
        return value

    def _answer_late(self, what: str) -> None:
        if what in self.late:
            self.late.remove(what)
            raise StoreTimeoutError(what, "the answer came too late.")


FAILED = Failed(1, 0, 1, "host-1", 7, 3, 0.5, "", "")


@pytest.mark.parametrize(
    ("told", "agreed"), [((Succeeded(), Succeeded()), Succeeded()), ((Succeeded(), FAILED), FAILED)]
)
def test_a_slow_store_delays_the_end_and_no_more(told: tuple[Outcome, Outcome], agreed: Outcome) -> None:
    store = SlowStore()
    links = [JobLink(store, "host-0:1", node_rank, num_nodes=2) for node_rank in range(2)]
    for link, outcome in zip(links, told, strict=True):
        link.tell(outcome)
    for link in links:
        assert select.select([link.fd], [], [], 10.0)[0] == [link.fd]
        assert link.outcome == agreed
    assert store.late == set()
