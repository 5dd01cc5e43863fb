"""A leader and its standby that lose each other never both go on alone, whatever is late, lost or said twice."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from disttrain.store.standby.succession import Consent, Side, may_take_over

NAMES = [b"a", b"b", b"c", b"d", b"e"]
SOMEBODY = st.sampled_from(NAMES)


@dataclass
class Standby:
    """What it has applied, and who has voted; here no vote is too old."""

    term: int = 1
    electors: frozenset[bytes] = frozenset()
    num_entries: int = 0
    votes: dict[bytes, int] = field(default_factory=dict)
    has_taken_over: bool = False


class AnySchedule(RuleBasedStateMachine):
    """Entries, pings, their answers and votes are each a step of their own; what is not taken is lost."""

    @initialize(electors=st.sets(SOMEBODY, min_size=1))
    def start(self, electors: set[bytes]) -> None:
        self.consent = Consent(1, electors)
        self.standby = Standby(electors=frozenset(electors))
        self.sides = {name: Side() for name in NAMES}
        self.entries: list[tuple[str, object]] = []
        self.pongs: list[tuple[bytes, int, bool]] = []
        self.is_alone = False
        self.num_terms = 1

    @precondition(lambda self: not self.is_alone)  # a leader that is alone tells the standby nothing more
    @rule(electors=st.sets(SOMEBODY, min_size=1))
    def electors_change(self, electors: set[bytes]) -> None:
        self.entries.append(("electors", frozenset(electors)))
        self.consent.changed(len(self.entries), electors)

    @precondition(lambda self: not self.is_alone)
    @rule()
    def a_term_is_renewed(self) -> None:
        if self.consent.wants_renewal:
            self.num_terms += 1
            self.entries.append(("term", self.num_terms))
            self.consent.renewed(len(self.entries), self.num_terms)

    @rule()
    def an_entry_is_applied(self) -> None:
        if self.standby.num_entries < len(self.entries) and not self.standby.has_taken_over:
            name, value = self.entries[self.standby.num_entries]
            setattr(self.standby, name, value)
            self.standby.num_entries += 1

    @property
    def told_term(self) -> int:
        """What the leader tells electors: once it is alone, a term that the standby never knows."""
        return self.num_terms + 1 if self.is_alone else self.consent.term

    @precondition(lambda self: not self.is_alone)  # nor does it listen to it
    @rule(num_late=st.integers(0, 2))
    def an_acknowledgement_arrives(self, num_late: int) -> None:
        self.consent.acknowledged(max(0, self.standby.num_entries - num_late))

    @rule(name=SOMEBODY, asks=st.booleans())
    def a_ping_arrives(self, name: bytes, asks: bool) -> None:
        side = self.sides[name]
        self.consent.side(name, side.for_leader, side.for_standby)
        self.pongs.append((name, self.told_term, asks))

    @rule(data=st.data())
    def an_answer_arrives(self, data: st.DataObject) -> None:
        if self.pongs:
            name, term, asks = data.draw(st.sampled_from(self.pongs))
            self.sides[name].heard(term, asks)

    @rule(name=SOMEBODY)
    def an_elector_is_asked_and_answers(self, name: bytes) -> None:
        for _ in range(2):
            side = self.sides[name]
            self.consent.side(name, side.for_leader, side.for_standby)
            side.heard(self.told_term, asks=True)

    @rule(name=SOMEBODY)
    def an_elector_loses_the_leader_and_votes(self, name: bytes) -> None:
        self.sides[name].heard(self.told_term, asks=False)
        self.sides[name].lost()
        self.a_vote_arrives(name)

    @rule(name=SOMEBODY)
    def an_elector_loses_the_leader(self, name: bytes) -> None:
        self.sides[name].lost()

    @rule(name=SOMEBODY)
    def a_late_vote_arrives(self, name: bytes) -> None:
        self.a_vote_arrives(name)

    def a_vote_arrives(self, name: bytes) -> None:
        if self.sides[name].for_standby:
            self.standby.votes[name] = self.sides[name].for_standby

    @rule()
    def the_leader_goes_alone(self) -> None:
        self.is_alone |= self.consent.may_go_alone

    @rule()
    def the_standby_takes_over(self) -> None:
        standby = self.standby
        standby.has_taken_over |= may_take_over(standby.term, standby.electors, standby.votes)

    @invariant()
    def never_both(self) -> None:
        assert not (self.is_alone and self.standby.has_taken_over)


TestAnySchedule = AnySchedule.TestCase
TestAnySchedule.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


def test_half_is_enough_for_the_leader_and_more_than_half_for_the_standby() -> None:
    consent = Consent(1, [b"a", b"b"])
    assert not consent.may_go_alone
    consent.side(b"a", 1, 0)
    assert consent.may_go_alone
    assert not may_take_over(1, [b"a", b"b"], {b"b": 1})
    assert may_take_over(1, [b"a", b"b", b"c"], {b"b": 1, b"c": 1})
    assert not may_take_over(1, [b"a", b"b", b"c"], {b"b": 1, b"c": 2})
    assert Consent(1, []).may_go_alone
    assert not may_take_over(1, [], {})


def test_an_elector_sides_once_in_a_term() -> None:
    side = Side()
    side.lost()
    assert (side.for_leader, side.for_standby) == (0, 0), "it knows no term"
    side.heard(3, asks=False)
    side.lost()
    side.heard(3, asks=True)
    assert (side.for_leader, side.for_standby) == (0, 3)
    side.heard(4, asks=True)
    side.lost()
    side.heard(3, asks=True)
    assert (side.for_leader, side.for_standby) == (4, 0)
