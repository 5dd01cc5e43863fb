"""How the nodes of a running job tell each other of its end.

One key, `outcome`, is written once: by the first node with a cause (compare_set decides who was first), or by the last
node whose workers have all succeeded. Every node waits for it, and lets the others know meanwhile that it is alive.
"""

from __future__ import annotations

import os
import threading
import time

from disttrain.errors import StoreError, StoreTimeoutError
from disttrain.store import PrefixStore
from disttrain.store.base import Store
from disttrain_launch.outcome import Lost, Outcome, Succeeded, decode, encode
from disttrain_launch.rendezvous_state import name_nodes

BEAT_S = 1.0
LOST_S = 10.0
"""A node whose beat stands still for so long is lost."""
_TELL_S = 5.0


def first_beat(store: Store, node_rank: int) -> None:
    """Make a node's beat exist; it does so before it joins, so that nobody ever waits for a beat."""
    store.add(f"beat/{node_rank}", 1)


class Pulse:
    """Which nodes have fallen silent, from their beats; pure."""

    def __init__(self, num_nodes: int, now_s: float) -> None:
        self._beats = [b""] * num_nodes
        self._changed_s = [now_s] * num_nodes

    def silent(self, beats: list[bytes], now_s: float) -> tuple[int, ...]:
        """Node ranks whose beat has been the same for LOST_S."""
        for node_rank, beat in enumerate(beats):
            if beat != self._beats[node_rank]:
                self._beats[node_rank] = beat
                self._changed_s[node_rank] = now_s
        return tuple(rank for rank, changed_s in enumerate(self._changed_s) if now_s - changed_s >= LOST_S)


class JobLink:
    """A node's side. `fd` becomes readable once `outcome` is known. Its threads end with the process.

    Args: store  of the job, closed by the caller;  where  its address, for messages;  node_rank  this node; node 0
          watches the others' beats;  num_nodes  of the job.
    """

    def __init__(self, store: Store, where: str, node_rank: int, num_nodes: int) -> None:
        self._store = PrefixStore("launch/0", store)
        self._where = where
        self._node_rank = node_rank
        self._num_nodes = num_nodes
        self._tellers: list[threading.Thread] = []
        self.fd, self._write_fd = os.pipe()
        self.outcome: Outcome | None = None
        self._is_known = threading.Event()
        threading.Thread(target=self._watch, name="job-link", daemon=True).start()

    def tell(self, outcome: Outcome) -> None:
        """Let the other nodes know, without waiting."""
        teller = threading.Thread(target=self._tell, args=(outcome,), name="job-link-tell", daemon=True)
        self._tellers.append(teller)
        teller.start()

    def leave(self, own: Outcome, wait_s: float) -> Outcome:
        """Wait until every node has come to its end, `wait_s` at most. Returns what all agreed on."""
        for teller in self._tellers:
            teller.join(_TELL_S)
        self._is_known.wait(_TELL_S)
        if not isinstance(self.outcome, Lost):
            try:
                self._store.barrier("left", self._num_nodes, wait_s)
            except StoreError:
                pass  # Who did not come has been stopped or lost; there is nobody to wait for.
        return self.outcome or own

    def _tell(self, outcome: Outcome) -> None:
        while self.outcome is None:
            try:
                self._write(outcome)
                return
            except StoreTimeoutError:
                continue  # A store that is slow to answer is not gone yet; what it heard already may be said again.
            except StoreError:
                return  # The watching thread meets the same and says so.

    def _write(self, outcome: Outcome) -> None:
        if isinstance(outcome, Succeeded):
            self._store.set(f"succeeded/{self._node_rank}", b"")
            if not self._store.check([f"succeeded/{node_rank}" for node_rank in range(self._num_nodes)]):
                return
        self._store.compare_set("outcome", b"", encode(outcome))

    def _watch(self) -> None:
        pulse = Pulse(self._num_nodes, time.monotonic())
        while self.outcome is None:
            try:
                self._store.wait(["outcome"], BEAT_S)
                self.outcome = decode(self._store.get("outcome"))
            except StoreTimeoutError:
                self._beat(pulse)
            except StoreError as error:
                self._lose(error)
        self._is_known.set()
        os.write(self._write_fd, b"!")

    def _beat(self, pulse: Pulse) -> None:
        try:
            self._store.add(f"beat/{self._node_rank}", 1)
            if self._node_rank == 0:
                beats = self._store.multi_get([f"beat/{node_rank}" for node_rank in range(self._num_nodes)])
                if silent := pulse.silent(beats, time.monotonic()):
                    problem = f"{name_nodes(silent)} gave no sign of life for {LOST_S:g} s; the job was stopped."
                    self._store.compare_set("outcome", b"", encode(Lost(problem)))
        except StoreTimeoutError:
            pass  # A store that is slow to answer is not gone yet.
        except StoreError as error:
            self._lose(error)

    def _lose(self, error: StoreError) -> None:
        self.outcome = Lost(f"node 0's store at {self._where} went away, and the job with it: {error.problem}")
