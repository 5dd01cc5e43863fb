"""Whatever happens to workers, one agent ends them all, tells its peers once, and says who was first."""

from __future__ import annotations

import signal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from disttrain_launch.workers.outcome import Failed, Interrupted, Outcome, Succeeded
from disttrain_launch.workers.supervision import (
    KILL_S,
    PASSED_SIGNALS,
    PATIENCE_S,
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


def failed(rank: int, returncode: int = 1) -> Failed:
    return Failed(rank, rank, 0, "host", 100 + rank, returncode, 1.0, "last lines", "")


def exited(*ranks: int, failures: tuple[Failed, ...] = ()) -> WorkersExited:
    return WorkersExited(frozenset(ranks), failures)


def supervision(*, asks_for_dumps: bool = False) -> Supervision:
    return Supervision(
        range(NUM_WORKERS),
        node_rank=0,
        host="host",
        stop_grace_s=2.0,
        shutdown_timeout_s=30.0,
        asks_for_dumps=asks_for_dumps,
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
        codes = {rank: data.draw(st.sampled_from([0, 1, -9])) for rank in ended}
        self.alive -= ended
        self.feed(exited(*ended, failures=tuple(failed(rank, code) for rank, code in codes.items() if code)))

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
        # Of all that stops a round, only the first is told, and that this launcher was sent a signal.
        assert len(self.tells) <= 2
        assert all(isinstance(tell, Interrupted) for tell in self.tells[1:])
        assert not (self.ends and self.alive)
        if self.machine.is_stopping and self.alive:
            assert self.is_stopped
        if self.machine.is_stopping and not self.alive:
            assert self.ends


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=20)
