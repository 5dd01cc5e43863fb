"""The nodes that node 0 knows, and which of them make the next round; pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from disttrain_launch.rendezvous.rounds import Node, choose_group_ranks
from disttrain_launch.workers.outcome import Interrupted


@dataclass
class Peer:
    node: Node
    group_rank: int | None = None
    """In the round that runs, or in the last one that it took part in."""
    is_busy: bool = False
    """It may have workers."""
    leaves: Interrupted | None = None


@dataclass(frozen=True)
class Choice:
    """A round's members, those who wait, and the members' group ranks by agent."""

    members: list[Peer]
    spares: list[Peer]
    group_ranks: dict[str, int]


def choose(peers: Iterable[Peer], leader: Node, max_nodes: int) -> Choice:
    """Chooses members of the last round first, then those who came first, by node rank where they have one."""
    order = sorted(
        peers,
        key=lambda peer: (
            peer.node.agent != leader.agent,
            peer.group_rank is None,
            peer.group_rank if peer.group_rank is not None else 0,
        ),
    )
    members = order[:max_nodes]
    new = [peer for peer in members[1:] if peer.group_rank is None]
    new.sort(key=lambda peer: (peer.node.node_rank is None, peer.node.node_rank or 0))
    old = [(peer.node.agent, peer.group_rank) for peer in members[1:] if peer.group_rank is not None]
    wishes = [(leader.agent, 0), *old, *((peer.node.agent, peer.node.node_rank) for peer in new)]
    return Choice(members, order[max_nodes:], choose_group_ranks(wishes))
