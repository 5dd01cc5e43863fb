"""Decides who may go on alone when a leader and its standby lose each other: never both. Pure: no clock, no I/O.

Electors are clients with a vote, one for each node of a job. In each term each elector votes at most once: for the
leader, that it may go on without this standby, or for the standby, that it may take over from this leader. The leader
needs half of the votes, the standby more than half, so not both can have enough. Besides, a standby whose lease lasts
(see `journal`) may take over from a leader that is proven dead, and a leader without electors goes on alone when the
lease is over.

Both count the same electors, which are among the standby's entries. While a change of electors is in flight, the leader
needs half of the old ones and half of the new ones, since it cannot know which of them the standby counts (joint
consensus: Ongaro, "Consensus: Bridging Theory and Practice", 2014, 4.3). A new term withdraws all votes; the leader
announces it to the electors when the standby has acknowledged it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Consent:
    """The leader's side."""

    def __init__(self, term: int, electors: Iterable[bytes]) -> None:
        self.term = term
        self._sets = [(0, frozenset(electors))]
        """Electors, and with how many entries the standby knows them; the first are those that it knows."""
        self._renewed: tuple[int, int] | None = None
        self._with_us: set[bytes] = set()
        self._against_us: set[bytes] = set()

    def changed(self, num_entries: int, electors: Iterable[bytes]) -> None:
        """Changes the electors; the standby knows the new ones once it has acknowledged so many entries."""
        self._sets.append((num_entries, frozenset(electors)))

    def renewed(self, num_entries: int, term: int) -> None:
        """`term` begins once the standby has acknowledged so many entries."""
        self._renewed = num_entries, term

    def acknowledged(self, num_entries: int) -> None:
        """The standby has applied so many entries."""
        while len(self._sets) > 1 and self._sets[1][0] <= num_entries:
            del self._sets[0]
        if self._renewed is not None and self._renewed[0] <= num_entries:
            self.term, self._renewed = self._renewed[1], None
            self._with_us, self._against_us = set(), set()

    def side(self, elector: bytes, for_leader: int, for_standby: int) -> None:
        """An elector says in which terms it sided last with the leader, and with the standby."""
        if for_leader == self.term:
            self._with_us.add(elector)
        if for_standby == self.term:
            self._against_us.add(elector)

    @property
    def wants_renewal(self) -> bool:
        """True if somebody has sided, and no new term is on its way."""
        return bool(self._with_us or self._against_us) and self._renewed is None

    @property
    def may_go_alone(self) -> bool:
        """True if the standby can never have enough in this term."""
        return all(2 * len(self._with_us & electors) >= len(electors) for _, electors in self._sets)


def may_take_over(term: int, electors: Iterable[bytes], votes: Mapping[bytes, int]) -> bool:
    """The standby's side: whether the leader can never have enough; `votes` are terms by elector."""
    counted = list(electors)
    return 2 * sum(votes.get(elector) == term for elector in counted) > len(counted)


class Side:
    """An elector's."""

    def __init__(self) -> None:
        self._term = 0
        self._is_for_leader = self._is_for_standby = False

    def heard(self, term: int, asks: bool) -> None:
        """The leader has told its term, and whether it asks to go on alone."""
        if term > self._term:
            self._term, self._is_for_leader, self._is_for_standby = term, False, False
        if term == self._term and asks and not self._is_for_standby:
            self._is_for_leader = True

    def lost(self) -> None:
        """The leader does not answer."""
        if self._term and not self._is_for_leader:
            self._is_for_standby = True

    @property
    def for_leader(self) -> int:
        """The term in which this elector has sided with the leader, 0: it has not."""
        return self._term if self._is_for_leader else 0

    @property
    def for_standby(self) -> int:
        """The term in which this elector has sided with the standby, 0: it has not."""
        return self._term if self._is_for_standby else 0
