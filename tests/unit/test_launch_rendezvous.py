"""Nodes become a job, whatever the order they come in, or all learn the same reason why not; what travels, travels."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain.errors import StoreTimeoutError
from disttrain.store import HashStore
from disttrain_launch.output.events import Chronicle, Record
from disttrain_launch.output.view import JobState
from disttrain_launch.rendezvous.link import JobLink
from disttrain_launch.rendezvous.messages import (
    Came,
    Done,
    Ended,
    Formed,
    Heard,
    Refused,
    Run,
    Stop,
    Stopped,
    Wait,
    Word,
    decode,
    encode,
)
from disttrain_launch.rendezvous.node0 import Leader, Pulse
from disttrain_launch.rendezvous.node_numbers import choose_group_ranks
from disttrain_launch.rendezvous.restarts import Again, GiveUp, Restarts
from disttrain_launch.rendezvous.rounds import Assignment, Node, Phase, Terms, name_nodes
from disttrain_launch.rendezvous.state import Command, NodeLost, Rendezvous, Tell, TimePassed, Warn
from disttrain_launch.workers.outcome import Changed, Failed, Interrupted, Lost, Outcome, Requeued, Succeeded
from tests.state_machines.rendezvous import failed


def node(rank: int, nodes: int = 3, **changes: object) -> Node:
    same = Node(f"agent-{rank}", rank, str(nodes), 2, "1.0", "run", "digest", f"host-{rank}", "1 s and 8")
    return replace(same, **changes)  # type: ignore[arg-type]


def machine_of(num_nodes: int = 3, *coming: Node, **terms: object) -> tuple[Rendezvous, list[Command]]:
    """A static job's machine, and what it said while node 0 and these came."""
    machine = Rendezvous(Terms(num_nodes, num_nodes, **terms), node(0, num_nodes), 0.0)  # type: ignore[arg-type]
    came = (node(0, num_nodes), *coming)
    return machine, [command for one in came for command in machine.handle(Came(one), 0.0)]


@given(st.integers(1, 12).flatmap(lambda num_nodes: st.permutations(range(1, num_nodes))), st.data())
def test_every_order_gives_the_same_round(order: list[int], data: st.DataObject) -> None:
    num_nodes = len(order) + 1
    repeated = data.draw(st.lists(st.sampled_from([0, *order]), max_size=3))
    machine, commands = machine_of(
        num_nodes, *(node(rank, num_nodes) for rank in [*order[:-1], *repeated, *order[-1:]])
    )
    assignments = {
        f"agent-{rank}": Assignment(0, rank, 2 * rank, num_nodes, 2 * num_nodes) for rank in range(num_nodes)
    }
    formed, *told = commands
    assert formed == Formed(0, 0, list(assignments))
    assert {command.agent: command.word for command in told} == {  # type: ignore[union-attr]
        agent: Run(assignment, 0) for agent, assignment in assignments.items()
    }
    assert (machine.phase, machine.awaited) == (Phase.RUNNING, "")


@given(st.lists(st.none() | st.integers(-1, 9), max_size=9))
def test_group_ranks_are_a_permutation_with_the_first_wishes_granted(wishes: list[int | None]) -> None:
    chosen = choose_group_ranks([(f"a{number}", wish) for number, wish in enumerate(wishes)])
    assert sorted(chosen.values()) == list(range(len(wishes)))
    for number, wish in enumerate(wishes):
        if wish is not None and 0 <= wish < len(wishes) and wish not in wishes[:number]:
            assert chosen[f"a{number}"] == wish


@pytest.mark.parametrize(
    ("misfit", "problem"),
    [
        ({"num_nodes": "4"}, "node 1 (host-1) has --nnodes 4, node 0 (host-0) has 3; all nodes need the same."),
        (
            {"version": "1.1"},
            "node 1 (host-1) has disttrain version 1.1, node 0 (host-0) has 1.0; all nodes need the same.",
        ),
        ({"run_id": "b"}, "node 1 (host-1) has --rdzv-id b, node 0 (host-0) has run; all nodes need the same."),
        (
            {"keep_alive": "9 s and 3"},
            (
                "node 1 (host-1) has a keep_alive_interval and keep_alive_max_attempt of 9 s and 3, node 0 (host-0) "
                "of 1 s and 8; all nodes need the same."
            ),
        ),
        ({"digest": "other"}, "node 1 (host-1) runs another script or other arguments than node 0 (host-0)."),
        ({"node_rank": 3}, "node 3 (host-1) is outside --nnodes 3."),
        ({"node_rank": 0}, "--node-rank 0 was given twice: host-0 and host-1."),
    ],
)
def test_a_misfit_is_named_to_all(misfit: dict[str, object], problem: str) -> None:
    machine, commands = machine_of(3, node(2), node(1, **misfit))
    words = {command.agent: command.word for command in commands if isinstance(command, Tell)}
    assert words.keys() == {"agent-0", "agent-1", "agent-2"}
    assert machine.num_unaware == 3
    assert {word.problem for word in words.values() if isinstance(word, Refused)} == {problem}
    assert machine.phase is Phase.OVER
    assert machine.handle(Came(node(1, agent="later")), 1.0) == [Tell("later", words["agent-0"])]
    for agent in (*words, "later"):
        machine.handle(Heard(agent), 2.0)
    assert machine.num_unaware == 0


def test_the_absent_are_named_when_time_is_up() -> None:
    machine, _ = machine_of(3, node(2), join_timeout_s=5.0)
    assert (machine.awaited, machine.deadline_s) == ("node 1 of 3", 5.0)
    words = [command.word for command in machine.handle(TimePassed(), 5.0) if isinstance(command, Tell)]
    assert [word.problem for word in words if isinstance(word, Refused)] == [
        "node 1 did not come within 5 s; nodes 0, 2 did."
    ] * 2


def test_other_numbers_of_workers_are_said_and_counted() -> None:
    machine, (warning, _, *told) = machine_of(2, node(1, 2, num_local_workers=3))
    said = "node 1 (host-1) has --nproc-per-node 3, node 0 (host-0) has 2; the job counts each node's own."
    assert warning == Warn(said)
    assert [command.word.assignment.world_size for command in told] == [5, 5]  # type: ignore[union-attr]
    assert machine.phase is Phase.RUNNING


def test_a_newcomer_that_differs_disturbs_no_job_that_runs() -> None:
    machine, _ = machine_of(2, node(1, 2), max_restarts=1)
    (told,) = machine.handle(Came(node(1, 2, agent="again", digest="other")), 1.0)
    assert isinstance(told, Tell)
    assert isinstance(told.word, Refused)
    assert (told.agent, machine.phase) == ("again", Phase.RUNNING)


def test_a_node_that_does_not_stop_its_workers_is_given_up() -> None:
    machine, _ = machine_of(3, node(1, stop_s=90.0), node(2))
    machine.handle(Ended("agent-2", 0, failed(2)), 10.0)
    assert machine.deadline_s == 100.0
    machine.handle(Stopped("agent-0", 0), 11.0)
    machine.handle(Stopped("agent-2", 0), 11.0)
    assert machine.awaited == "node 1 (host-1) to stop its workers"
    warning, given_up, *ends = machine.handle(TimePassed(), 100.0)
    left = "node 1 (host-1) did not stop its workers within 90 s, and was given up."
    assert (warning, given_up) == (Warn(left), Tell("agent-1", Done(Lost(left))))
    assert {command.agent: command.word for command in ends} == {  # type: ignore[union-attr]
        agent: Done(failed(2)) for agent in ("agent-0", "agent-2")
    }


def test_a_job_whose_node_0_does_not_stop_ends() -> None:
    machine, _ = machine_of(2, node(1, 2), max_restarts=1)
    machine.handle(Ended("agent-1", 0, failed(1)), 0.0)
    machine.handle(Stopped("agent-1", 0), 0.0)
    told = machine.handle(TimePassed(), 60.0)
    left = "node 0 (host-0) did not stop its workers within 60 s, and was given up."
    assert {command.word for command in told if isinstance(command, Tell)} == {Done(Lost(left))}
    assert machine.phase is Phase.OVER


def test_a_newcomer_that_is_held_is_watched_and_may_be_lost_as_well() -> None:
    machine, _ = machine_of(2, node(1, 2), max_restarts=1)
    machine.handle(Came(node(1, 2, agent="again")), 1.0)
    assert machine.agents == ["agent-1", "again"]
    told = machine.handle(NodeLost("again"), 9.0)
    silent = "this node gave no sign of life for 8 s, and the job went on without it."
    assert told == [Tell("again", Done(Lost(silent)))]
    assert (machine.agents, machine.deadline_s) == (["agent-1"], None)
    assert machine.handle(Came(node(1, 2, agent="again")), 10.0) == []


def test_a_failure_since_a_node_is_gone_counts_as_its_loss() -> None:
    machine = Rendezvous(Terms(1, 2), node(0, num_nodes="1:2"), 0.0)
    for rank in (0, 1):
        machine.handle(Came(node(rank, num_nodes="1:2")), 0.0)
    machine.handle(Ended("agent-0", 0, failed(0)), 1.0)
    assert machine.handle(Stopped("agent-0", 0), 2.0) == []
    assert "node 1 (host-1)" in machine.awaited
    given_up, _, begun = machine.handle(NodeLost("agent-1"), 9.0)
    assert isinstance(given_up, Tell)
    assert given_up.agent == "agent-1"
    assert begun == Tell("agent-0", Run(Assignment(1, 0, 0, 1, 2), 0))


def test_a_launcher_that_is_started_again_waits_until_the_old_one_is_missed() -> None:
    machine = Rendezvous(Terms(1, 2, keep_alive_s=8.0), node(0, num_nodes="1:2"), 0.0)
    for rank in (0, 1):
        machine.handle(Came(node(rank, num_nodes="1:2")), 0.0)
    again = node(1, num_nodes="1:2", agent="again")
    assert machine.handle(Came(again), 1.0) == [Tell("again", Wait("to see whether node 1 (host-1) is lost"))]
    lost = machine.handle(NodeLost("agent-1"), 5.0)
    assert [command.agent for command in lost if isinstance(command, Tell)] == ["agent-1", "agent-0"]
    formed, *begun = machine.handle(Stopped("agent-0", 0), 6.0)
    assert formed == Formed(1, 0, ["agent-0", "again"])
    assert [(command.agent, command.word.assignment.group_rank) for command in begun] == [("agent-0", 0), ("again", 1)]  # type: ignore[union-attr]


def test_who_wants_the_rank_of_a_living_node_is_refused_in_time() -> None:
    machine, _ = machine_of(2, node(1, 2), max_restarts=1, keep_alive_s=8.0)
    machine.handle(Came(node(1, 2, agent="twin")), 1.0)
    assert machine.deadline_s == 17.0
    (told,) = machine.handle(TimePassed(), 17.0)
    assert isinstance(told, Tell)
    assert isinstance(told.word, Refused)
    assert told.agent == "twin"


def test_restarts_wait_longer_and_longer_and_stop_where_nothing_gets_done() -> None:
    restarts = Restarts(max_restarts=9, max_quick_failures=3)
    others = [restarts.after(failed(rank, ran_s=1.0)) for rank in (0, 1, 0, 1)]
    assert others == [Again(0.0), Again(1.0), Again(2.0), Again(4.0)]
    assert restarts.after(failed(0, ran_s=60.0)) == Again(0.0)
    alike = [restarts.after(failed(2, ran_s=1.0)) for _ in range(3)]
    assert alike[:2] == [Again(0.0), Again(1.0)]
    assert isinstance(alike[2], GiveUp)
    assert Restarts(0, 3).after(failed(0)) == GiveUp("")


OUTCOMES: list[Outcome] = [Succeeded(), failed(1, -9), Interrupted(15, 1, "h"), Changed("1 came"), Lost("1 went")]


def test_messages_travel() -> None:
    words: list[Word] = [
        Run(Assignment(1, 2, 3, 4, 5), 6, 7),
        Wait("for it"),
        Refused("no", "yes"),
        Done(Succeeded(), "n"),
    ]
    words += [Stop(3, outcome) for outcome in OUTCOMES]
    assert [decode(encode(word)) for word in words] == words
    reports = [
        Came(node(1)),
        Heard("a"),
        Came(node(1, node_rank=None)),
        Stopped("a", 1),
        *(Ended("a", 1, one) for one in OUTCOMES),
    ]
    assert [decode(encode(report)) for report in reports] == reports
    assert [outcome.exit_code for outcome in OUTCOMES] == [0, 137, 143, 1, 1]


@pytest.mark.parametrize("data", [b"", b"[", b'{"kind": "Popen"}', b'{"kind": "Stopped"}', b'{"no": 1}'])
def test_what_is_no_message_is_no_value(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"no message|Expecting"):
        decode(data)


def test_a_node_of_another_version_is_understood() -> None:
    other = decode(b'{"kind": "Came", "node": {"kind": "Node", "agent": "a", "version": "9", "novelty": 1}}')
    assert other == Came(Node("a", version="9"))


def test_many_nodes_are_named_shortly() -> None:
    assert name_nodes((3,)) == "node 3"
    assert name_nodes(tuple(range(20)), max_shown=3) == "nodes 0, 1, 2 and 17 more"


def test_a_silent_node_is_noticed_by_its_beat() -> None:
    pulse = Pulse(keep_alive_s=8.0)
    assert pulse.silent({"a": b"1", "b": b"1"}, 1.0) == []
    assert pulse.silent({"a": b"2", "b": b"1"}, 5.0) == []
    assert pulse.silent({"a": b"3", "b": b"1", "c": b"1"}, 9.0) == ["b"]
    assert pulse.silent({"a": b"3", "b": b"2", "c": b"1"}, 16.0) == []


class SlowStore(HashStore):
    """Does what it is asked, but says so too late: each kind of write, the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.late = {"queue_push", "add"}

    def queue_push(self, key: str, value: bytes | str, capacity: int | None = None, timeout: object = None) -> None:
        super().queue_push(key, value, capacity)
        self._answer_late("queue_push")

    def add(self, key: str, amount: int) -> int:
        total = super().add(key, amount)
        self._answer_late("add")
        return total

    def _answer_late(self, what: str) -> None:
        if what in self.late:
            self.late.remove(what)
            raise StoreTimeoutError(what, "the answer came too late.")


@pytest.mark.parametrize("ends", [(Succeeded(), Succeeded()), (Succeeded(), failed(1, 3))])
def test_a_slow_store_delays_the_end_and_no_more(ends: tuple[Outcome, Outcome]) -> None:
    store = SlowStore()
    nodes = [node(rank, 2) for rank in range(2)]
    records: list[Record] = []
    chronicle = Chronicle(JobState("job", 0.0, 0))
    machine = Rendezvous(Terms(2, 2), nodes[0], time.monotonic())
    leader = Leader(store, machine, chronicle, records.extend, beat_s=0.05, close_s=3.0, say=print)
    leader.start()
    links = [JobLink(store, "host-0:1", one, beat_s=0.05, max_missed_beats=160) for one in nodes]
    for link in links:
        num_heard, word = link.wait(0, 10.0)
        assert isinstance(word, Run)
    for link, outcome in zip(links, ends, strict=True):
        link.ended(0, outcome)
    for link in links if isinstance(ends[1], Failed) else ():
        link.wait(num_heard, 10.0)
        link.stopped(0)
    for link in links:
        link.wait_for_end(10.0)
        assert link.word == Done(ends[1])
        link.leave()
    leader.join()
    assert store.late == set()


def test_a_node_that_cannot_start_its_workers_is_left_out() -> None:
    machine = Rendezvous(Terms(1, 3, max_restarts=2), node(0, nodes="1:3"), 0.0)  # type: ignore[arg-type]
    for rank in range(3):
        machine.handle(Came(node(rank, nodes="1:3")), 0.0)  # type: ignore[arg-type]
    assert machine.phase is Phase.RUNNING
    problem = Lost("node 1 could not start its workers: out of memory")
    commands = machine.handle(Ended("agent-1", 0, problem), 1.0)
    assert Tell("agent-1", Done(problem)) in commands
    assert Tell("agent-2", Stop(0, Changed(problem.problem))) in commands
    machine.handle(Stopped("agent-0", 0), 1.0)
    machine.handle(Stopped("agent-2", 0), 1.0)
    assert machine.phase is Phase.RUNNING
    assert sorted(machine.agents) == ["agent-2"]


def test_a_signal_to_a_stopping_job_ends_it() -> None:
    machine, _ = machine_of(2, node(1, 2), max_restarts=5)
    machine.handle(Ended("agent-1", 0, failed(1)), 1.0)
    assert machine.phase is Phase.STOPPING
    interrupted = Interrupted(15, 0, "host-0")
    machine.handle(Ended("agent-0", 0, interrupted), 1.0)
    machine.handle(Stopped("agent-0", 0), 1.0)
    commands = machine.handle(Stopped("agent-1", 0), 1.0)
    assert {command.word for command in commands if isinstance(command, Tell)} == {Done(interrupted)}


def test_a_rank_to_blame_comes_to_light_while_the_others_are_stopped() -> None:
    machine, _ = machine_of(2, node(1, 2))
    lost = replace(failed(0), is_consequence=True)
    own = failed(3)
    assert [command.word for command in machine.handle(Ended("agent-0", 0, lost), 1.0)] == [Stop(0, lost)] * 2  # type: ignore[union-attr]
    assert machine.handle(Stopped("agent-0", 0), 1.0) == []
    assert [command.word for command in machine.handle(Ended("agent-1", 0, own), 1.0)] == [Stop(0, own)] * 2  # type: ignore[union-attr]
    assert machine.handle(Ended("agent-1", 0, lost), 1.0) == []
    assert machine.handle(Stopped("agent-1", 0), 1.0) == [Tell(f"agent-{rank}", Done(own)) for rank in range(2)]


def test_a_job_whose_workers_leave_when_told_to_is_to_be_requeued() -> None:
    machine, _ = machine_of(2, node(1, 2), max_restarts=3)
    told, requeued = Interrupted(15, 1, "host-1"), Requeued(0, 0, "host-0")
    machine.handle(Ended("agent-1", 0, told), 1.0)
    machine.handle(Ended("agent-0", 0, requeued), 1.0)
    machine.handle(Ended("agent-1", 0, told), 1.0)
    machine.handle(Stopped("agent-0", 0), 1.0)
    assert machine.handle(Stopped("agent-1", 0), 1.0) == [Tell(f"agent-{rank}", Done(requeued)) for rank in range(2)]


def test_a_node_that_leaves_after_it_has_saved_says_so_and_the_others_go_on() -> None:
    terms = Terms(1, 2)
    machine = Rendezvous(terms, node(0, 2), 0.0)
    for rank in range(2):
        machine.handle(Came(node(rank, 2)), 0.0)
    requeued = Requeued(1, 1, "host-1")
    change = Changed("node 1 (host-1) leaves (SIGTERM)", is_orderly=True)
    assert Tell("agent-0", Stop(0, change)) in machine.handle(Ended("agent-1", 0, Interrupted(15, 1, "host-1")), 1.0)
    machine.handle(Ended("agent-1", 0, requeued), 1.0)
    assert Tell("agent-1", Done(requeued)) in machine.handle(Stopped("agent-1", 0), 1.0)
    again = machine.handle(Stopped("agent-0", 0), 1.0)
    assert [command.word.assignment.round for command in again if isinstance(command, Tell)] == [1]  # type: ignore[union-attr]


def test_the_dumps_of_a_node_that_ends_well_meanwhile_are_waited_for() -> None:
    """It has been told to stop, and its answer comes with them."""
    machine = Rendezvous(Terms(2, 2), node(0, 2), 0.0)
    for rank in range(2):
        machine.handle(Came(node(rank, 2)), 0.0)
    assert Tell("agent-1", Stop(0, failed(0, 1))) in machine.handle(Ended("agent-0", 0, failed(0, 1)), 1.0)
    machine.handle(Stopped("agent-0", 0), 1.0)
    assert machine.handle(Ended("agent-1", 0, Succeeded()), 1.0) == []
    assert machine.phase is Phase.STOPPING
    machine.handle(Stopped("agent-1", 0), 1.0)
    assert machine.phase is Phase.OVER
