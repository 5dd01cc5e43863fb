"""The rendezvous' state machine, by which nodes become a job: events in, commands out, no I/O and no clock.

Node 0 runs one `Rendezvous` for the whole job and decides alone, so that no two nodes can think differently. Nodes
gather; when enough have come, each is told its ranks in a numbered round. A round ends for all of its nodes alike: when
a worker fails, a node is lost or leaves, or others want to join. Only when every node has stopped its workers, or is
lost, it is decided what follows: another round, or the end.

A failure counts as a restart; nodes that come and go don't. Workers often fail since a node is gone that nobody misses
yet: such a failure counts as the loss that it is.

After dask's worker state machine. Every event costs a few steps, a round one word per node, however many there are.
"""

from __future__ import annotations

from dataclasses import dataclass

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
)
from disttrain_launch.rendezvous.node_numbers import Peer, absent_text, busy_text, choose
from disttrain_launch.rendezvous.pending import Held
from disttrain_launch.rendezvous.refusals import given_up, misfit, taken_twice, too_few, too_late, uneven
from disttrain_launch.rendezvous.restarts import Again, GiveUp, Restarts
from disttrain_launch.rendezvous.rounds import Node, Phase, Terms, assign_ranks
from disttrain_launch.workers.outcome import Changed, Failed, Interrupted, Lost, Outcome, Requeued, Succeeded, outweighs


@dataclass(frozen=True)
class NodeLost:
    """Its beat stands still."""

    agent: str


@dataclass(frozen=True)
class TimePassed:
    pass


Event = Came | Ended | Stopped | Heard | NodeLost | TimePassed


@dataclass(frozen=True)
class Tell:
    """This is now the word to that node."""

    agent: str
    word: Word


@dataclass(frozen=True)
class Warn:
    text: str


Command = Tell | Warn | Formed


class Rendezvous:
    """A job as node 0 sees it; its own coming, its workers' end and so on are events too.

    Args: terms  of the job;  leader  node 0; it always has group rank 0;  now_s  any clock, the same as `handle`'s.
    """

    def __init__(self, terms: Terms, leader: Node, now_s: float) -> None:
        self.terms = terms
        self._leader = leader
        self.phase = Phase.GATHERING
        self._round = -1
        self._peers: dict[str, Peer] = {}
        self._by_node_rank: dict[int, str] = {}
        self._held = Held()
        self._gone: set[str] = set()
        """Agents to which no more is to be said: a report of theirs that was repeated must not bring them back."""
        self._members: set[str] = set()
        self._num_busy = 0
        self._has_success = False
        self._restarts = Restarts(terms.max_restarts, terms.max_quick_failures)
        self._now_s = now_s
        self._until_s = now_s + terms.join_timeout_s
        self._last_call_s: float | None = None
        self._not_before_s = now_s
        self._cause: Outcome | None = None
        self._is_change = False
        self._last_word: Word | None = None
        self._unaware: set[str] = set()
        self._commands: list[Command] = []

    @property
    def num_unaware(self) -> int:
        """The number of nodes that have not confirmed yet that the job is over."""
        return len(self._unaware)

    @property
    def everyone(self) -> list[str]:
        """All nodes that wait for a word, node 0 among them."""
        return [*self._peers, *self._held]

    @property
    def agents(self) -> list[str]:
        """Those whose beats are to be watched."""
        return [agent for agent in self.everyone if agent != self._leader.agent]

    @property
    def deadline_s(self) -> float | None:
        """The time at which `TimePassed` is next of interest."""
        times_s = self._held.deadlines_s
        if self.phase is Phase.STOPPING:
            times_s.append(self._until_s)
        if self.phase is Phase.GATHERING:
            times_s += [self._until_s, self._not_before_s]
        if self._last_call_s is not None and self.phase in (Phase.GATHERING, Phase.RUNNING):
            times_s.append(self._last_call_s)
        return min((time_s for time_s in times_s if time_s > self._now_s), default=None)

    @property
    def awaited(self) -> str:
        """For whom those that are here wait; empty when for nobody."""
        if self.phase is Phase.STOPPING:
            return busy_text(self._peers.values())
        if self.phase is not Phase.GATHERING:
            return ""
        needed = self.terms.min_nodes if self._is_short else self.terms.max_nodes
        return absent_text(self._by_node_rank, len(self._peers), needed, self.terms, self._leader.num_nodes)

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Commands come in the order in which they are to be carried out."""
        self._commands, self._now_s = [], now_s
        if self._last_word is not None:
            self._after_the_end(event, self._last_word)
            return self._commands
        match event:
            case Came(node):
                self._came(node, now_s)
            case Ended(agent, _, Interrupted() as outcome) if agent in self._held:
                self._held.release(agent)
                self._tell(agent, Done(outcome))
            case Ended(agent, round, outcome) if agent in self._peers:
                self._ended(self._peers[agent], round, outcome)
            case Stopped(agent, round) if agent in self._peers:
                self._stopped(self._peers[agent], round)
            case NodeLost(agent) if agent in self._peers:
                self._lost(self._peers[agent])
            case NodeLost(agent) if agent in self._held:
                self._held.release(agent)
                self._tell(agent, Done(given_up(self.terms)))
        for node in self._held.expired(now_s):
            self._tell(node.agent, too_late(node))
        self._advance(now_s)
        return self._commands

    def _after_the_end(self, event: Event, last_word: Word) -> None:
        if isinstance(event, Came):
            self._unaware.add(event.agent)
            self._tell(event.agent, last_word)
        elif isinstance(event, Heard | NodeLost):
            self._unaware.discard(event.agent)

    # What events change.

    def _came(self, node: Node, now_s: float) -> None:
        if node.agent in self._peers or node.agent in self._held or node.agent in self._gone:
            return
        has_begun = self._round >= 0
        refused = self._misfit(node)
        if refused is not None:
            self._tell(node.agent, refused)
            if not has_begun:
                # Nobody shall wait for a job that was not started as meant. Later only the newcomer goes.
                self._end(refused)
                self._unaware.add(node.agent)
        elif has_begun and not self.terms.survives_losses:
            self._tell(node.agent, too_late(node))
        elif node.node_rank is not None and node.node_rank in self._by_node_rank:
            # Perhaps the launcher there was killed and started again; that will show.
            self._held.hold(node, now_s + 2 * self.terms.keep_alive_s)
            self._tell(node.agent, Wait(f"to see whether {self._holder(node)} is lost"))
        else:
            self._admit(node)
            if self.phase is Phase.RUNNING:
                self._tell(node.agent, Wait("for the next round; one is running"))

    def _admit(self, node: Node) -> None:
        self._peers[node.agent] = Peer(node)
        if node.node_rank is not None:
            self._by_node_rank.setdefault(node.node_rank, node.agent)
        if node.num_local_workers != self._leader.num_local_workers:
            self._commands.append(Warn(uneven(node, self._leader)))

    def _misfit(self, node: Node) -> Refused | None:
        """Why this node takes no part, whatever the others do."""
        refused = misfit(node, self._leader, self.terms)
        if refused is None and self._round < 0 and not self.terms.is_elastic and node.node_rank in self._by_node_rank:
            return taken_twice(node, self._holder(node))
        return refused

    def _holder(self, node: Node) -> Node:
        """The agent that has the rank that `node` wants."""
        assert node.node_rank is not None, "only a rank can be taken"
        return self._peers[self._by_node_rank[node.node_rank]].node

    def _ended(self, peer: Peer, round: int, outcome: Outcome) -> None:
        if isinstance(outcome, Interrupted):
            self._interrupted(peer, outcome)
        elif round != self._round or not peer.is_busy:
            return
        elif isinstance(outcome, Succeeded):
            self._has_success = True
            if self.phase is Phase.RUNNING:
                self._rest(peer)  # Else it has been told to stop since, and answers that: with its dumps.
        elif isinstance(outcome, Lost) and self.terms.survives_losses and peer.node.agent != self._leader.agent:
            # It could not start its workers; the others can.
            self._rest(peer)
            self._remove(peer, Done(outcome))
            self._change(outcome.problem)
        elif isinstance(outcome, Requeued) and peer.leaves is not None:
            peer.leaves = outcome
        elif self.phase is Phase.RUNNING:
            self._stop(outcome)
        elif self._cause is not None and outweighs(outcome, self._cause):
            self._cause = outcome
            for agent in sorted(self._members):
                self._tell(agent, Stop(self._round, outcome))

    def _interrupted(self, peer: Peer, outcome: Interrupted) -> None:
        """A signal to a launcher ends the job, but where nodes may leave only that node's part in it."""
        if not self.terms.is_elastic or peer.node.agent == self._leader.agent:
            if self.phase is Phase.GATHERING:
                self._end(Done(outcome))
            elif self.phase is Phase.RUNNING:
                self._stop(outcome)
            elif not isinstance(self._cause, Requeued):
                self._cause, self._is_change = outcome, False
        elif peer.is_busy:
            peer.leaves = outcome
            self._change(f"{peer.node} leaves ({outcome.signal_name})", is_orderly=True)
        else:
            self._remove(peer, Done(outcome))

    def _stopped(self, peer: Peer, round: int) -> None:
        if round != self._round or not peer.is_busy or self.phase is not Phase.STOPPING:
            return
        self._rest(peer)
        if peer.leaves is not None:
            self._remove(peer, Done(peer.leaves))

    def _lost(self, peer: Peer) -> None:
        silent = f"gave no sign of life for {self.terms.keep_alive_s:g} s"
        was_busy = peer.is_busy
        self._rest(peer)
        # It may live, behind a network that failed: then it learns here that it is given up.
        self._remove(peer, Done(given_up(self.terms)))
        if was_busy and self.terms.survives_losses:
            self._change(f"{peer.node} {silent}")
        elif was_busy and self.phase is Phase.RUNNING:
            self._stop(Lost(f"{peer.node} {silent}; the job was stopped."))

    def _change(self, change: str, *, is_orderly: bool = False) -> None:
        if self.phase is Phase.RUNNING:
            self._stop(Changed(change, is_orderly))
        self._is_change = not isinstance(self._cause, Interrupted | Requeued | Lost)

    def _rest(self, peer: Peer) -> None:
        self._num_busy -= peer.is_busy
        peer.is_busy = False

    def _remove(self, peer: Peer, word: Word) -> None:
        agent, node_rank = peer.node.agent, peer.node.node_rank
        del self._peers[agent]
        self._members.discard(agent)
        self._tell(agent, word)
        if node_rank is not None and self._by_node_rank.get(node_rank) == agent:
            del self._by_node_rank[node_rank]
            if (heir := self._held.heir(node_rank)) is not None:
                self._admit(heir)

    # What follows from where things stand.

    @property
    def _is_short(self) -> bool:
        # Others may come before node 0 itself does.
        return self._leader.agent not in self._peers or len(self._peers) < self.terms.min_nodes

    def _advance(self, now_s: float) -> None:
        if self.phase is Phase.STOPPING and now_s >= self._until_s:
            self._stop_waiting()
        if self.phase is Phase.STOPPING and self._num_busy == 0:
            self._decide(now_s)
        if self.phase is Phase.RUNNING:
            if self._num_busy == 0:
                self._end(Done(Succeeded()))
            elif self._is_called(now_s, has_enough=self._has_room_for_others):
                newcomers = len(self._peers) - len(self._members)
                self._change(f"{newcomers} more node{'s' if newcomers > 1 else ''} came", is_orderly=True)
        if self.phase is Phase.GATHERING and now_s >= self._not_before_s:
            if self._is_called(now_s, has_enough=not self._is_short):
                self._begin()
            elif now_s >= self._until_s:
                self._give_up_waiting() if self._is_short else self._begin()

    @property
    def _has_room_for_others(self) -> bool:
        return not self._has_success and len(self._members) < min(len(self._peers), self.terms.max_nodes)

    def _is_called(self, now_s: float, *, has_enough: bool) -> bool:
        """True when the round may begin: all nodes that there may be are here, or the last call is over."""
        if not has_enough:
            self._last_call_s = None
            return False
        if self._last_call_s is None:
            self._last_call_s = now_s + self.terms.last_call_s
        return len(self._peers) >= self.terms.max_nodes or now_s >= self._last_call_s

    def _begin(self) -> None:
        self._round += 1
        self.phase, self._last_call_s = Phase.RUNNING, None
        self._cause, self._is_change, self._has_success = None, False, False
        chosen = choose(self._peers.values(), self._leader, self.terms.max_nodes)
        workers = {peer.node.agent: peer.node.num_local_workers for peer in chosen.members}
        assignments = assign_ranks(self._round, chosen.group_ranks, workers)
        self._members = set(assignments)
        self._commands.append(Formed(self._round, self._restarts.num_restarts, list(assignments)))
        self._num_busy = len(chosen.members)
        for peer in chosen.members:
            agent = peer.node.agent
            peer.group_rank, peer.is_busy = chosen.group_ranks[agent], True
            self._tell(agent, Run(assignments[agent], self._restarts.num_restarts))
        for peer in chosen.spares:
            peer.group_rank = None
            self._tell(peer.node.agent, Wait(f"as a spare: the job has its {self.terms.max_nodes} nodes"))

    def _stop(self, cause: Outcome) -> None:
        self.phase, self._cause = Phase.STOPPING, cause
        for agent in self._members if isinstance(cause, Failed) else ():
            self._peers[agent].is_busy = True  # Its workers may have ended while others waited for them: dumps tell.
        busy = [peer.node for peer in self._peers.values() if peer.is_busy]
        self._num_busy = len(busy)
        self._until_s = self._now_s + max((node.stop_s for node in busy), default=0.0)
        for node in busy:
            self._tell(node.agent, Stop(self._round, cause))

    def _stop_waiting(self) -> None:
        """Some nodes live and did not stop their workers: whatever holds them shall not hold the others."""
        for peer in [peer for peer in self._peers.values() if peer.is_busy]:
            lost = Lost(f"{peer.node} did not stop its workers within {peer.node.stop_s:g} s, and was given up.")
            self._commands.append(Warn(lost.problem))
            if peer.node.agent == self._leader.agent:
                self._end(Done(lost))
                return
            self._rest(peer)
            self._remove(peer, Done(lost))

    def _decide(self, now_s: float) -> None:
        assert self._cause is not None, "nothing is stopped without a cause"
        if self._is_change:
            self._gather(now_s, now_s)
        elif not isinstance(self._cause, Failed):
            self._end(Done(self._cause))
        else:
            match self._restarts.after(self._cause):
                case GiveUp(note):
                    self._end(Done(self._cause, note))
                case Again(after_s):
                    self._gather(now_s, now_s + after_s)

    def _gather(self, now_s: float, not_before_s: float) -> None:
        self.phase, self._not_before_s = Phase.GATHERING, not_before_s
        self._until_s = not_before_s + self.terms.join_timeout_s
        # Who was there goes on at once; a last call is for those who never were.
        self._last_call_s = None if self._is_short else now_s

    def _give_up_waiting(self) -> None:
        if self._round < 0:
            self._end(too_few(set(self._by_node_rank), len(self._peers), self.terms))
        else:
            shortage = f"{len(self._peers)} of at least {self.terms.min_nodes} nodes were left"
            self._end(Done(Lost(f"{shortage}, and no other came within {self.terms.join_timeout_s:g} s.")))

    def _end(self, word: Word) -> None:
        self.phase, self._last_word = Phase.OVER, word
        # Node 0 itself may not have come yet.
        self._unaware = {self._leader.agent, *self.everyone}
        for agent in sorted(self._unaware):
            self._tell(agent, word)

    def _tell(self, agent: str, word: Word) -> None:
        if isinstance(word, Done | Refused):
            self._gone.add(agent)
        self._commands.append(Tell(agent, word))
