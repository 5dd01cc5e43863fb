"""Gives nodes their numbers (group ranks): of the nodes that node 0 knows, those that make the next round; pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from disttrain_launch.rendezvous.rounds import Node, Terms, name_nodes
from disttrain_launch.workers.outcome import Interrupted, Requeued


@dataclass
class Peer:
    node: Node
    group_rank: int | None = None
    """In the round that runs, or in the last one that it took part in."""
    is_busy: bool = False
    """It may have workers."""
    leaves: Interrupted | Requeued | None = None


MAX_NAMED = 8


def busy_text(peers: Iterable[Peer]) -> str:
    """Tells those that have workers, and are to stop them."""
    busy = [str(peer.node) for peer in peers if peer.is_busy]
    return f"{', '.join(busy[:MAX_NAMED])}{' and others' if len(busy) > MAX_NAMED else ''} to stop its workers"


def absent_text(taken: Collection[int], num_here: int, num_needed: int, terms: Terms, num_nodes: str) -> str:
    """Tells the nodes that are awaited, by their ranks where these are known; empty when none is. `num_nodes`: of the
    job, as node 0 was told."""
    absent = tuple(rank for rank in range(num_needed) if rank not in taken)
    num_more = num_needed - num_here
    if len(absent) == num_more and not terms.is_elastic:
        return f"{name_nodes(absent)} of {num_needed}" if absent else ""
    return f"{num_more} more node{'s' if num_more > 1 else ''} ({num_here} of {num_nodes} here)"


@dataclass(frozen=True)
class ChosenNodes:
    """A round's members, those who wait, and the members' group ranks by agent."""

    members: list[Peer]
    spares: list[Peer]
    group_ranks: dict[str, int]


def choose(peers: Iterable[Peer], leader: Node, max_nodes: int) -> ChosenNodes:
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
    return ChosenNodes(members, order[max_nodes:], choose_group_ranks(wishes))


def choose_group_ranks(wishes: Sequence[tuple[str, int | None]]) -> dict[str, int]:
    """A permutation of 0 .. len(wishes) - 1 by agent, where who comes first in `wishes` gets his wish.

    Wishes that cannot be had, and None, are given what is left over, in their order.
    """
    taken: dict[int, str] = {}
    without = []
    for agent, wish in wishes:
        if wish is not None and 0 <= wish < len(wishes) and wish not in taken:
            taken[wish] = agent
        else:
            without.append(agent)
    free = (group_rank for group_rank in range(len(wishes)) if group_rank not in taken)
    return {**{agent: group_rank for group_rank, agent in taken.items()}, **dict(zip(without, free, strict=False))}
