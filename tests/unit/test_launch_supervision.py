"""Whatever happens to workers, one agent ends them all, tells its peers once, and says who was first."""

from __future__ import annotations

import signal
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from disttrain.reports import REQUEUE_EXIT_CODE
from disttrain_launch.workers.outcome import Changed, Failed, Interrupted, Outcome, Requeued, Succeeded, outweighs
from disttrain_launch.workers.supervision import (
    KILL_S,
    PASSED_SIGNALS,
    PATIENCE_S,
    SETTLE_S,
    STOP_SIGNALS,
    AskForDumps,
    Command,
    DeadlinePassed,
    End,
    Event,
    LeaveBehind,
    RoundEnds,
    SayAwaited,
    Send,
    SetDeadline,
    SignalCame,
    Supervision,
    Tell,
    WorkersExited,
)

NUM_WORKERS = 4
KILLED = [Send(signal.SIGKILL, with_children=True), SetDeadline(KILL_S)]


def failed(rank: int, returncode: int = 1, summary: str = "", *, is_consequence: bool = False) -> Failed:
    return Failed(rank, rank, 0, "host", 100 + rank, returncode, 1.0, "last lines", "", summary, is_consequence)


def left(*ranks: int) -> WorkersExited:
    """These have saved, and left."""
    return exited(*ranks, failures=tuple(failed(rank, REQUEUE_EXIT_CODE) for rank in ranks))


def exited(*ranks: int, failures: tuple[Failed, ...] = ()) -> WorkersExited:
    return WorkersExited(frozenset(ranks), failures)


def supervision(*, asks_for_dumps: bool = False, shows_all: bool = False) -> Supervision:
    return Supervision(
        range(NUM_WORKERS),
        node_rank=0,
        host="host",
        stop_grace_s=2.0,
        shutdown_timeout_s=30.0,
        asks_for_dumps=asks_for_dumps,
        shows_all=shows_all,
    )


def commands_of(*events: Event, asks_for_dumps: bool = False) -> list[Command]:
    machine = supervision(asks_for_dumps=asks_for_dumps)
    return [command for event in events for command in machine.handle(event)]


def test_all_succeed() -> None:
    patience = SetDeadline(PATIENCE_S)
    assert commands_of(exited(0, 3), exited(1), exited(2)) == [patience, Tell(Succeeded()), End(Succeeded())]


def test_who_is_awaited_after_others_have_ended_is_said_once() -> None:
    commands = commands_of(exited(0, 3), DeadlinePassed(), exited(1), exited(2))
    assert commands[:2] == [SetDeadline(PATIENCE_S), SayAwaited(frozenset({1, 2}))]
    assert commands[2:] == [Tell(Succeeded()), End(Succeeded())]


def test_a_failure_stops_the_rest() -> None:
    first = failed(2)
    commands = commands_of(
        exited(0), exited(2, failures=(first,)), exited(1, 3, failures=(failed(1, -15), failed(3, 1)))
    )
    stopped = [Send(signal.SIGTERM, with_children=True), SetDeadline(2.0)]
    assert commands == [SetDeadline(PATIENCE_S), *stopped, Tell(first), End(first)]


def test_of_several_at_once_the_killed_one_is_named() -> None:
    killed = failed(3, -9)
    commands = commands_of(exited(0, 1, 2, 3, failures=(failed(0), failed(1), killed)))
    assert commands == [Tell(killed), End(killed)]


def test_who_does_not_stop_in_time_is_killed() -> None:
    commands = commands_of(exited(1, failures=(failed(1),)), DeadlinePassed(), exited(0, 2, 3))
    assert commands[3:] == [*KILLED, End(failed(1))]


def test_whom_nothing_ends_is_left_behind() -> None:
    commands = commands_of(exited(1, failures=(failed(1),)), *[DeadlinePassed()] * 4)
    assert commands[3:] == [*KILLED, LeaveBehind(), End(failed(1))]


def test_the_rest_dumps_before_it_is_stopped() -> None:
    commands = commands_of(
        exited(1, failures=(failed(1),)), DeadlinePassed(), DeadlinePassed(), exited(0, 2, 3), asks_for_dumps=True
    )
    assert commands == [
        AskForDumps(),
        Tell(failed(1)),
        Send(signal.SIGTERM, with_children=True),
        SetDeadline(2.0),
        *KILLED,
        End(failed(1)),
    ]


def test_who_ends_while_it_should_dump_need_not_be_stopped() -> None:
    commands = commands_of(exited(1, failures=(failed(1),)), exited(0, 2, 3), DeadlinePassed(), asks_for_dumps=True)
    assert commands == [AskForDumps(), Tell(failed(1)), End(failed(1))]


def test_a_signal_is_passed_on_and_workers_may_take_their_time() -> None:
    commands = commands_of(SignalCame(signal.SIGTERM), exited(0, 1, 2, 3))
    assert commands == [
        Send(signal.SIGTERM, with_children=True),
        SetDeadline(30.0),
        Tell(Interrupted(signal.SIGTERM, 0, "host")),
        End(Interrupted(signal.SIGTERM, 0, "host")),
    ]


def test_a_signal_while_a_round_is_stopping_is_told_once() -> None:
    interrupted = Interrupted(signal.SIGTERM, 0, "host")
    commands = commands_of(RoundEnds(failed(9)), SignalCame(signal.SIGTERM), SignalCame(signal.SIGTERM))
    again = Send(signal.SIGTERM, with_children=True)
    assert commands == [again, SetDeadline(2.0), again, Tell(interrupted), again]


def test_a_second_interrupt_kills() -> None:
    commands = commands_of(SignalCame(signal.SIGINT), SignalCame(signal.SIGINT))
    assert commands[-2:] == KILLED


def test_user_signals_reach_the_workers_alone_and_stop_nothing() -> None:
    commands = commands_of(SignalCame(signal.SIGUSR1), exited(0, 1, 2, 3))
    assert commands == [Send(signal.SIGUSR1, with_children=False), Tell(Succeeded()), End(Succeeded())]


def test_a_peers_failure_stops_us_and_is_the_outcome() -> None:
    theirs = failed(9, -11)
    commands = commands_of(RoundEnds(theirs), exited(0, 1, 2, 3))
    assert commands == [Send(signal.SIGTERM, with_children=True), SetDeadline(2.0), End(theirs)]


def test_the_peers_word_about_who_was_first_is_final() -> None:
    theirs = failed(9, -11)
    commands = commands_of(exited(1, failures=(failed(1),)), RoundEnds(theirs), exited(0, 2, 3))
    assert commands == [
        Send(signal.SIGTERM, with_children=True),
        SetDeadline(2.0),
        Tell(failed(1)),
        End(theirs),
    ]


def test_who_lost_a_peer_may_not_be_to_blame() -> None:
    lost, own = failed(0, is_consequence=True), failed(2)
    commands = commands_of(
        exited(0, failures=(lost,)),
        exited(2, failures=(own,)),
        exited(1, 3, failures=(failed(1, is_consequence=True), failed(3, is_consequence=True))),
        asks_for_dumps=True,
    )
    assert commands == [AskForDumps(SETTLE_S), Tell(lost), Tell(own), End(own)]
    assert commands_of(exited(0, 1, 2, 3, failures=(lost, own))) == [Tell(own), End(own)]


def test_who_was_about_to_fail_as_we_stopped_it_is_to_blame_too() -> None:
    lost = failed(0, is_consequence=True)
    stopped = exited(1, failures=(failed(1, -signal.SIGTERM),))
    own = failed(2, -signal.SIGTERM, "ValueError: x")
    commands = commands_of(exited(0, failures=(lost,)), stopped, exited(2, failures=(own,)), exited(3))
    cause = replace(own, returncode=1)  # Python's, where nobody stops it.
    assert [command for command in commands if isinstance(command, Tell | End)] == [Tell(lost), Tell(cause), End(cause)]


def test_workers_that_leave_after_a_notice_have_not_failed() -> None:
    requeued = Requeued(1, 0, "host")
    assert commands_of(left(1), left(0, 2, 3)) == [SetDeadline(30.0), Tell(requeued), End(requeued)]
    interrupted = Interrupted(signal.SIGTERM, 0, "host")
    assert commands_of(SignalCame(signal.SIGTERM), left(1), left(0, 2, 3))[2:] == [
        Tell(interrupted),
        Tell(requeued),
        End(requeued),
    ]
    assert commands_of(RoundEnds(requeued), DeadlinePassed()) == [SetDeadline(30.0), *KILLED]


def test_workers_may_save_when_nodes_come_and_go() -> None:
    orderly = Changed("1 more node came", is_orderly=True)
    assert commands_of(RoundEnds(orderly), left(0, 1, 2, 3), asks_for_dumps=True) == [
        Send(signal.SIGTERM, with_children=True),
        SetDeadline(30.0),
        End(orderly),
    ]
    lost = Changed("node 1 gave no sign of life")
    assert commands_of(RoundEnds(lost), asks_for_dumps=True) == [AskForDumps()]


class AnyOrder(RuleBasedStateMachine):
    """Random events in random order: whoever is left was told to stop, and the end comes once, with nobody left."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = supervision()
        self.alive = set(range(NUM_WORKERS))
        self.ends: list[Outcome] = []
        self.tells: list[Outcome] = []
        self.is_stopped = False

    def feed(self, event: Event) -> None:
        for command in self.machine.handle(event):
            match command:
                case End(outcome):
                    self.ends.append(outcome)
                case Tell(outcome):
                    self.tells.append(outcome)
                case LeaveBehind():
                    assert self.is_stopped
                    self.alive.clear()
                case Send(number, with_children):
                    assert self.alive
                    self.is_stopped |= with_children and number not in PASSED_SIGNALS

    @precondition(lambda self: self.alive and not self.ends)
    @rule(data=st.data())
    def workers_exit(self, data: st.DataObject) -> None:
        ended = data.draw(st.sets(st.sampled_from(sorted(self.alive)), min_size=1))
        codes = {rank: data.draw(st.sampled_from([0, 1, -9, REQUEUE_EXIT_CODE])) for rank in ended}
        self.alive -= ended
        is_lost = data.draw(st.booleans())
        failures = (failed(rank, code, is_consequence=is_lost) for rank, code in codes.items() if code)
        self.feed(exited(*ended, failures=tuple(failures)))

    @precondition(lambda self: not self.ends)
    @rule(number=st.sampled_from([*STOP_SIGNALS, *PASSED_SIGNALS]))
    def signal_comes(self, number: int) -> None:
        self.feed(SignalCame(number))

    @precondition(lambda self: not self.ends)
    @rule()
    def peer_fails(self) -> None:
        self.feed(RoundEnds(failed(7)))

    @rule()
    def time_passes(self) -> None:
        self.feed(DeadlinePassed())

    @invariant()
    def the_end_comes_once_and_last(self) -> None:
        assert len(self.ends) <= 1
        # Of all that stops a round, only the first is told, what is likelier, and that this launcher was sent a signal.
        assert len(self.tells) <= 4
        # A signal that comes to a round which ends anyway is told, and stays without weight.
        causes = [tell for number, tell in enumerate(self.tells) if not number or not isinstance(tell, Interrupted)]
        for before, tell in pairwise(causes):
            assert outweighs(tell, before)
        assert not (self.ends and self.alive)
        if self.machine.is_stopping and self.alive:
            assert self.is_stopped or isinstance(self.tells[0], Requeued)
        if self.machine.is_stopping and not self.alive:
            assert self.ends


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=20)


@pytest.mark.parametrize(("shows_all", "is_consequence"), [(False, False), (True, False), (False, True)])
def test_others_may_say_why_they_end_where_that_is_of_use(shows_all: bool, is_consequence: bool) -> None:
    machine = supervision(asks_for_dumps=True, shows_all=shows_all)
    first = failed(1, is_consequence=is_consequence)
    settle_s = SETTLE_S if shows_all or is_consequence else 0.0
    assert machine.handle(exited(1, failures=(first,)))[0] == AskForDumps(settle_s)
