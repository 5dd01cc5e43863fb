"""Node 0's lease: who has it, on which node the store's standby is to be, and how a successor finds its way.

Keys, under `launch/`: `leader` is the agent that decides, `standby` the one that is to keep the store's standby,
`node/<agent>` what a node has said about itself, `formed` the last round. Where a standby has become the store, its
agent takes the lease as well when the leader's beat stands still for as long as any node's may.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from disttrain.errors import StoreError, StoreTimeoutError
from disttrain.store.base import Store
from disttrain.store.protocol.wire import Address
from disttrain_launch.rendezvous.messages import Came, Formed, Word, decode
from disttrain_launch.rendezvous.rounds import Node

LEADER: Final = "leader"
STANDBY: Final = "standby"
FORMED: Final = "formed"
_CHECKS: Final = 4
"""The number of times that the leader checks its lease, within the time after which another may take its place."""


class SupersededError(StoreError):
    """Another node leads the job by now."""


class Lease:
    """The leader's own view of it; who makes this object takes it.

    Args: store  under `launch/`;  agent  the leader's;  home  where the job's store is;  keep_alive_s  how long the
          leader may be silent.
    """

    def __init__(self, store: Store, agent: str, home: Callable[[], Address], keep_alive_s: float) -> None:
        self._store = store
        self._agent = agent
        self._where_is_home = home
        self._home = home()
        self._check_s = keep_alive_s / _CHECKS
        self._checked_s = time.monotonic()
        self._chosen = ""
        self._hosts: set[str] = set()
        """Agents whose standby has become the store."""
        store.set(LEADER, agent)

    def check(self) -> None:
        """Before anybody is told anything. Raises SupersededError."""
        while (asked_s := time.monotonic()) - self._checked_s >= self._check_s:
            try:
                leader = self._store.get(LEADER).decode()
            except StoreTimeoutError:
                continue  # A store that is slow to answer is not gone yet.
            if leader != self._agent:
                raise SupersededError("disttrain-launch", "this node was silent too long, and another leads the job.")
            self._checked_s = asked_s
            return

    def choose_standby(self, agents: list[str]) -> None:
        """Let one of `agents` keep the standby; the same as before where it can."""
        home = self._where_is_home()
        if home != self._home:
            self._home = home
            self._hosts.add(self._chosen)
        able = [agent for agent in agents if agent not in self._hosts]
        chosen = self._chosen if self._chosen in able else "".join(able[:1])
        if chosen != self._chosen:
            self._chosen = chosen
            self._store.set(STANDBY, chosen)


def told_by(store: Store) -> dict[str, tuple[Node, Word | None]]:
    """Each agent's node, and the last word that it was told, from what is in the store."""
    words = {key.removeprefix("word/") for key in store.list_keys("word/")}
    last_words: dict[str, tuple[Node, Word | None]] = {}
    for key in store.list_keys("node/"):
        agent = key.removeprefix("node/")
        report = decode(store.get(key))
        if isinstance(report, Came):
            last_words[agent] = report.node, decode(store.get(f"word/{agent}")) if agent in words else None
    return last_words


def last_formed(store: Store) -> Formed | None:
    """The last round of the job, if there was one."""
    return decode(store.get(FORMED)) if store.check([FORMED]) else None
