"""Keeps the standby of the job's store on this node when node 0 wants it, and takes node 0's place when that is lost.

The standby is a process of its own, like the store's server (`store/standby/follower.py`). When it has become the
store, and the agent that led the job is silent for as long as no node may be, this node leads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from disttrain.errors import DisttrainError, StoreError, StoreTimeoutError
from disttrain.store import Following, PrefixStore, ServerProcess, TCPStore, spawn_server
from disttrain.store.connection.addresses import own_address
from disttrain_launch.rendezvous.lease import LEADER, STANDBY
from disttrain_launch.rendezvous.node0 import ROOM, Leader, Pulse, Say
from disttrain_launch.request.addresses import is_loopback
from disttrain_launch.request.job import JobSpec

_AGAIN_S: Final = 5.0
"""After which a standby that ended is started again."""


class Standby:
    """Of one node.

    Args: store  of the job, closed by the caller;  agent  this node's;  token  of the job;  lead  makes the leader that
          is to follow on the agent named, of which clients at the address given are told;  say  to who started us.
    """

    def __init__(
        self,
        spec: JobSpec,
        store: TCPStore,
        agent: str,
        token: str | None,
        lead: Callable[[str, str], Leader],
        say: Say,
    ) -> None:
        self._spec = spec
        self._store = store
        self._room = PrefixStore(ROOM, store)
        self._agent = agent
        self._token = token
        self._lead = lead
        self._say = say
        self._known_as = ""
        self._server: ServerProcess | None = None
        self._started_s = float("-inf")
        self.leader: Leader | None = None
        """Once this node has taken node 0's place."""
        self._is_over = threading.Event()
        self._pulse = Pulse(spec.terms.keep_alive_s)
        self._thread = threading.Thread(target=self._run, name="standby", daemon=True)

    def start(self) -> None:
        """Return at once."""
        self._thread.start()

    def close(self) -> None:
        """Let go of what runs here, after the leader, if it is here, has said how the job ended."""
        self._is_over.set()
        # Whatever it does now takes a beat at most, but for the start of a process.
        self._thread.join(2 * self._spec.beat_s + 1)
        if self._server is not None:
            self._server.close()

    def _run(self) -> None:
        chosen: bytes | None = None
        while not self._is_over.is_set() and self.leader is None:
            try:
                chosen = self._room.watch(STANDBY, chosen, self._spec.beat_s)
            except StoreTimeoutError:
                pass  # It is as it was, or the store is slow to answer.
            except StoreError:
                return  # This node's link meets the same and says so.
            try:
                if self._is_home:
                    self._succeed()
                else:
                    self._keep(is_wanted=chosen == self._agent.encode())
            except StoreTimeoutError:
                continue
            except DisttrainError as error:
                self._say(f"the standby of the job's store cannot be kept here: {error}")

    @property
    def _is_home(self) -> bool:
        """True when the standby has become the store."""
        return self._server is not None and self._store.addresses[0] == (self._known_as, self._server.port)

    def _keep(self, *, is_wanted: bool) -> None:
        if self._server is not None and (not is_wanted or not self._server.is_running):
            self._server.close()
            self._server = None
        if is_wanted and self._server is None and time.monotonic() - self._started_s >= _AGAIN_S:
            self._started_s = time.monotonic()
            host, port = self._store.addresses[0]
            self._known_as = own_address(host)
            following = Following(host, port, self._known_as)
            listen_on = self._known_as if is_loopback(self._known_as) else ""
            self._server = spawn_server(listen_on, 0, self._token, following=following)

    def _succeed(self) -> None:
        """Lead, if the one that did is silent."""
        lost = self._room.get(LEADER).decode()
        beats = self._room.multi_get([f"beat/{lost}"])
        if not self._pulse.silent({lost: beats[0]}, time.monotonic()):
            return
        if self._room.compare_set(LEADER, lost, self._agent).decode() == self._agent:
            self._say("node 0 is lost, and this node has taken its place")
            leader = self._lead(lost, self._known_as)
            leader.start()
            self.leader = leader
