"""Whatever order things happen in: rounds are whole, never two at once, and everything comes to an end."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from disttrain_launch.rendezvous.messages import Came, Done, Refused
from disttrain_launch.rendezvous.rounds import Phase, Terms
from tests.state_machines.rendezvous import Cluster, Player, node

ELASTIC = Terms(2, 3, max_restarts=2, join_timeout_s=100.0, last_call_s=5.0)


class AnySchedule(RuleBasedStateMachine):
    """Random faults at random moments, in jobs of every kind."""

    @initialize(
        sizes=st.sampled_from([(1, 1), (2, 2), (1, 3), (2, 3), (3, 5)]),
        max_restarts=st.integers(0, 3),
        max_quick_failures=st.integers(0, 2),
    )
    def start(self, sizes: tuple[int, int], max_restarts: int, max_quick_failures: int) -> None:
        self.cluster = Cluster(Terms(*sizes, max_restarts=max_restarts, max_quick_failures=max_quick_failures))
        self.num_nodes = 1

    def some(self, data: st.DataObject, *, busy: bool) -> str | None:
        def fits(player: Player) -> bool:
            return player.is_alive and (not busy or (player.running is not None and not player.has_failed))

        fitting = [agent for agent, player in self.cluster.players.items() if fits(player)]
        return data.draw(st.sampled_from(fitting)) if fitting else None

    @precondition(lambda self: self.num_nodes < 7)
    @rule(data=st.data())
    def node_comes(self, data: st.DataObject) -> None:
        ranks = [None, *range(1, self.cluster.terms.max_nodes)]
        newcomer = node(
            f"a{self.num_nodes}",
            data.draw(st.sampled_from(ranks)),
            self.cluster.terms,
            num_local_workers=data.draw(st.integers(1, 3)),
        )
        self.num_nodes += 1
        self.cluster.come(newcomer)

    @precondition(lambda self: self.cluster.reports)
    @rule()
    def report_arrives(self) -> None:
        self.cluster.deliver()

    @precondition(lambda self: self.cluster.reports)
    @rule(data=st.data())
    def report_comes_twice(self, data: st.DataObject) -> None:
        self.cluster.reports.append(data.draw(st.sampled_from(self.cluster.reports)))

    @rule()
    def newcomers_overtake_each_other(self) -> None:
        """Node 0 too may come last."""
        reports = self.cluster.reports
        if reports and all(isinstance(report, Came) for report in reports):
            reports.append(reports.pop(0))

    @rule(data=st.data())
    def word_is_heard(self, data: st.DataObject) -> None:
        if agent := self.some(data, busy=False):
            self.cluster.hear(agent)

    @rule(data=st.data(), how=st.sampled_from(["fail", "succeed", "interrupt"]))
    def workers_end(self, data: st.DataObject, how: str) -> None:
        if agent := self.some(data, busy=True):
            getattr(self.cluster, how)(agent)

    @rule(data=st.data())
    def launcher_is_interrupted(self, data: st.DataObject) -> None:
        agent = self.some(data, busy=False)
        if agent and self.cluster.players[agent].running is None:
            self.cluster.interrupt(agent)

    @rule(data=st.data())
    def node_dies(self, data: st.DataObject) -> None:
        agent = self.some(data, busy=False)
        if agent and agent != self.cluster.leader:
            self.cluster.die(agent)

    @precondition(lambda self: self.cluster.terms.is_elastic and self.cluster.heirs)
    @rule(data=st.data())
    def leader_dies(self, data: st.DataObject) -> None:
        self.cluster.inherit(data.draw(st.sampled_from(self.cluster.heirs)))

    @rule(data=st.data())
    def node_is_missed(self, data: st.DataObject) -> None:
        """Whether it is dead, or only cut off."""
        if agents := self.cluster.machine.agents:
            self.cluster.miss(data.draw(st.sampled_from(agents)))

    @rule()
    def time_passes(self) -> None:
        self.cluster.pass_time()

    def teardown(self) -> None:
        if hasattr(self, "cluster"):
            self.cluster.settle()


TestAnySchedule = AnySchedule.TestCase
TestAnySchedule.settings = settings(max_examples=60, stateful_step_count=40)


def steps(cluster: Cluster, faults: frozenset[str]) -> Iterator[tuple[str, str, str]]:
    """(fault or empty, method, agent) of what can happen next; each fault happens once."""
    if cluster.reports:
        yield "", "deliver", ""
    for agent, player in cluster.players.items():
        if not player.is_alive:
            if agent in cluster.machine.agents:
                yield "", "miss", agent
            continue
        if not player.has_heard:
            yield "", "hear", agent
        if player.running is not None and player.has_failed:
            yield "", "stop", agent
        if player.running is not None and not player.has_failed:
            yield from ((fault, fault, agent) for fault in ("fail", "succeed", "interrupt") if fault in faults)
        if agent != cluster.leader and "die" in faults:
            yield "die", "die", agent
        if agent in cluster.heirs and "inherit" in faults:
            yield "inherit", "inherit", agent
    if cluster.machine.deadline_s is not None and "pass_time" in faults:
        yield "pass_time", "pass_time", ""


def play(cluster: Cluster, method: str, agent: str) -> Cluster:
    after = copy.deepcopy(cluster)
    action = getattr(after, method)
    (partial(action, agent) if agent else action)()
    return after


def state_of(cluster: Cluster) -> str:
    machine = {name: value for name, value in vars(cluster.machine).items() if name not in ("_commands", "_restarts")}
    machine["_members"] = sorted(machine["_members"])
    machine["_gone"] = sorted(machine["_gone"])
    machine["_unaware"] = sorted(machine["_unaware"])
    return repr((machine, vars(cluster.machine._restarts), cluster.players, cluster.reports))


@pytest.mark.parametrize(
    ("terms", "num_nodes", "faults"),
    [
        (Terms(2, 2), 2, {"fail", "die"}),
        (Terms(2, 2, max_restarts=1), 2, {"fail", "succeed"}),
        (Terms(1, 2, last_call_s=5.0), 2, {"die", "pass_time"}),
        (Terms(1, 2, max_restarts=1), 2, {"fail", "interrupt"}),
        (ELASTIC, 3, {"die", "pass_time"}),
        (ELASTIC, 3, {"fail"}),
        (ELASTIC, 3, {"inherit", "fail"}),
        (Terms(1, 2, max_restarts=1), 2, {"inherit", "fail"}),
    ],
)
def test_every_order_of_few_nodes_and_faults(terms: Terms, num_nodes: int, faults: set[str]) -> None:
    """All states that can be reached are visited, and from each the job comes to an end."""
    first = Cluster(terms)
    for rank in range(1, num_nodes):
        first.come(node(f"a{rank}", rank, terms))
    seen: set[str] = set()
    todo = [(first, frozenset(faults))]
    while todo:
        cluster, left = todo.pop()
        nexts = [(play(cluster, method, agent), left - {fault}) for fault, method, agent in steps(cluster, left)]
        for after, after_left in nexts:
            key = state_of(after) + repr(sorted(after_left))
            if key not in seen:
                seen.add(key)
                todo.append((after, after_left))
        if not nexts and cluster.machine.phase is not Phase.OVER:
            cluster.settle()
    assert len(seen) > 50


def round_of(*wishes: int | None) -> Cluster:
    """A round runs with the nodes a0, a1 ... that want these numbers."""
    cluster = Cluster(Terms(1, max(len(wishes), 1) + 1, last_call_s=5.0))
    for place, wish in enumerate(wishes, 1):
        cluster.come(node(f"a{place}", wish, cluster.terms))
    while cluster.reports:
        cluster.deliver()
    cluster.pass_time()
    return cluster


def test_a_successor_knows_who_waits_for_anothers_number() -> None:
    cluster = round_of(None, 1)
    cluster.come(node("a3", 1, cluster.terms))
    cluster.deliver()
    cluster.inherit("a1")
    assert cluster.machine.everyone == ["a1", "a2", "a3"]
    cluster.miss("a2")
    cluster.miss("a3")
    assert cluster.machine.everyone == ["a1"]
    cluster.settle()


def test_a_leader_that_was_the_only_one_with_workers_is_told_that_it_is_lost() -> None:
    cluster = round_of()
    cluster.come(node("a1", None, cluster.terms))
    cluster.deliver()
    cluster.inherit("a1")
    assert isinstance(cluster.players["a0"].word, Done)
    cluster.settle()


def test_a_successor_counts_on_though_all_who_ran_are_gone() -> None:
    cluster = round_of()
    for agent in ("a1", "a2"):
        cluster.come(node(agent, None, cluster.terms))
        cluster.deliver()
    cluster.inherit("a1")
    cluster.inherit("a2")
    cluster.settle()
    assert [assignment.round for assignments in cluster.assignments for assignment in assignments.values()] == [0, 1]


def test_ranks_are_kept_though_two_leaders_are_lost() -> None:
    cluster = round_of(None, None, None)
    cluster.inherit("a1")
    cluster.inherit("a2")
    cluster.settle()
    assert [(agent, assignment.group_rank) for agent, assignment in sorted(cluster.assignments[1].items())] == [
        ("a2", 0),
        ("a3", 1),
    ]


def test_who_had_gone_does_not_come_back_to_a_successor() -> None:
    cluster = round_of(None, None)
    again = Came(cluster.players["a1"].node)
    cluster.miss("a1")
    cluster.inherit("a2")
    cluster.reports.append(again)
    cluster.deliver()
    assert cluster.machine.everyone == ["a2"]
    cluster.settle()


def test_who_waited_too_long_for_anothers_number_does_not_come_back() -> None:
    cluster = round_of(1)
    late = node("a2", 1, cluster.terms)
    cluster.come(late)
    cluster.deliver()
    cluster.pass_time()
    assert isinstance(cluster.players["a2"].word, Refused)
    cluster.reports.append(Came(late))
    cluster.deliver()
    assert cluster.machine.everyone == ["a0", "a1"]
    cluster.settle()
