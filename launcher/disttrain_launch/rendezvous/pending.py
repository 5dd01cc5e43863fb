"""Newcomers that want the number of a node that is perhaps lost: held until that shows, and no longer than a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from disttrain_launch.rendezvous.rounds import Node


@dataclass
class Held:
    """By agent, in the order in which they came."""

    _waiting: dict[str, tuple[Node, float]] = field(default_factory=dict)

    def __contains__(self, agent: str) -> bool:
        return agent in self._waiting

    def __iter__(self) -> Iterator[str]:
        return iter(self._waiting)

    @property
    def deadlines_s(self) -> list[float]:
        return [until_s for _, until_s in self._waiting.values()]

    def hold(self, node: Node, until_s: float) -> None:
        self._waiting[node.agent] = node, until_s

    def release(self, agent: str) -> None:
        """Whatever becomes of it, it is not held any more."""
        del self._waiting[agent]

    def expired(self, now_s: float) -> list[Node]:
        """Those whose time is over; they are released."""
        over = [node for node, until_s in self._waiting.values() if now_s >= until_s]
        for node in over:
            self.release(node.agent)
        return over

    def heir(self, node_rank: int) -> Node | None:
        """Releases the node that has waited longest for this number; None where nobody has."""
        heir = next((node for node, _ in self._waiting.values() if node.node_rank == node_rank), None)
        if heir is not None:
            self.release(heir.agent)
        return heir
