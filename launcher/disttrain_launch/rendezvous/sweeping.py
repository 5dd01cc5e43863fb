"""Removes what earlier rounds left in the store, of their workers and of nodes that have gone, so that a job may have
any number of rounds, and of nodes that take each other's place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager

from disttrain.errors import DisttrainError
from disttrain.store.base import Store
from disttrain_launch.rendezvous.node0 import ROOM

_OF_AGENTS = ("beat", "node", "word", "status")

KEPT_ROUNDS = 2
"""The one that runs, and the last: a node that was given up may still have workers of it, and they wait for keys."""


class Sweeper:
    """Removes keys in a thread of its own: there is one for some of each rank's, and nobody shall wait for that.

    Args: reach  gives the store that workers use, for each sweep.

    A round is swept twice, since a worker may still write something while it is swept; a node's keys go when two rounds
    have begun without it.
    """

    def __init__(self, reach: Callable[[], AbstractContextManager[Store]]) -> None:
        self._reach = reach
        self._known: set[str] = set()
        self._absent: set[str] = set()

    def begun(self, round: int, agents: Collection[str]) -> None:
        """This round has begun, with these nodes and those that wait. Returns at once."""
        absent = self._known.difference(agents)
        gone = sorted(absent & self._absent)
        self._known = {*agents, *absent}.difference(gone)
        self._absent = absent.difference(gone)
        if round >= KEPT_ROUNDS:
            threading.Thread(target=self._sweep, args=(round - KEPT_ROUNDS, gone), name="sweeper", daemon=True).start()

    def _sweep(self, round: int, gone: list[str]) -> None:
        try:
            with self._reach() as store:
                # Each world of the round has its keys below this: `init_process_group` sees to it.
                for swept in range(max(0, round - 1), round + 1):
                    for key in store.list_keys(f"round-{swept}/"):
                        store.delete_key(key)
                for agent in gone:
                    for kind in _OF_AGENTS:
                        store.delete_key(f"{ROOM}/{kind}/{agent}")
        except DisttrainError:
            return  # The store is gone, or slow: keys that stay do no harm.
