"""The rendezvous as a successor of node 0 takes it over, knowing the last round and the last words to all; pure.

Whoever was told to run, or to stop, may have workers. They are all stopped, as when any other node is lost; what
follows is decided when none is left.
"""

from __future__ import annotations

from collections.abc import Mapping

from disttrain_launch.rendezvous.messages import Done, Formed, Run, Stop, Wait, Word
from disttrain_launch.rendezvous.rounds import Node, Phase, Terms
from disttrain_launch.rendezvous.state import Command, Event, Rendezvous
from disttrain_launch.workers.outcome import Lost


class Inherited(Rendezvous):
    """A job as it goes on under another node.

    Args: leader  that node;  lost  the one before;  told  each agent's node, and the last word to it, if there was one;
          formed  the last round, if there was one.
    """

    def __init__(
        self,
        terms: Terms,
        leader: Node,
        now_s: float,
        lost: str,
        last_words: Mapping[str, tuple[Node, Word | None]],
        formed: Formed | None,
    ):
        super().__init__(terms, leader, now_s)
        self._gone.add(lost)
        group_ranks: dict[str, int] = {}
        if formed is not None:
            self._round, self._restarts.num_restarts = formed.round, formed.num_restarts
            group_ranks = {agent: group_rank for group_rank, agent in enumerate(formed.agents)}
        others = [about for agent, about in last_words.items() if agent != lost]
        # Of two that want one number it is the leader's, or else his who takes part.
        for node, word in sorted(
            others, key=lambda about: (about[0].agent != leader.agent, isinstance(about[1], Wait))
        ):
            self._remember(node, word, group_ranks.get(node.agent))
        last_word = last_words[lost][1] if lost in last_words else None
        if isinstance(last_word, Done):
            self._end(last_word)
        else:
            # It may live, behind a network that failed.
            self._tell(lost, Done(Lost("this node gave no sign of life, and another has taken its place as node 0.")))
        if self._num_busy and self._last_word is None:
            self.phase = Phase.RUNNING
            self._change(
                f"{last_words[lost][0] if lost in last_words else 'node 0'} was lost, and {leader} has taken its place"
            )
        self._first, self._commands = self._commands, []

    @property
    def gone(self) -> frozenset[str]:
        """Agents that do not come back."""
        return frozenset(self._gone)

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """As before; what the others are to know of the succession comes with the first event."""
        first, self._first = self._first, []
        return first + super().handle(event, now_s)

    def _remember(self, node: Node, word: Word | None, group_rank: int | None) -> None:
        match word:
            case None:
                return  # It says again that it has come.
            case Wait() if node.node_rank in self._by_node_rank:
                self._held.hold(node, self._now_s + 2 * self.terms.keep_alive_s)
                return
            case Run() | Stop() | Wait():
                self._admit(node)
            case _:
                self._gone.add(node.agent)
                return
        peer = self._peers[node.agent]
        peer.group_rank = group_rank
        if isinstance(word, Run | Stop):
            peer.is_busy = True
            self._members.add(node.agent)
            self._num_busy += 1
