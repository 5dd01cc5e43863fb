"""A node's side of the rendezvous: it reports to node 0, and hears its words.

Reports that node 0 has not answered are repeated now and then, since a word may get lost when a connection breaks; node
0 knows a repeated one. Meanwhile each node lets node 0 know that it is alive. A node whose beats are not answered for
as long as node 0 bears with silent nodes stops: whether node 0 is gone or this node is cut off, the job is not here any
more, and workers that went on would only be in the way of those that have taken their place.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from contextlib import suppress

from disttrain.errors import StoreError, StoreTimeoutError
from disttrain.store import PrefixStore
from disttrain.store.base import Store
from disttrain_launch.output.events import Record
from disttrain_launch.rendezvous.messages import (
    Came,
    Done,
    Ended,
    Happened,
    Heard,
    Refused,
    Report,
    Stopped,
    Word,
    decode,
    encode,
)
from disttrain_launch.rendezvous.node0 import REPORTS, ROOM
from disttrain_launch.rendezvous.rounds import Node
from disttrain_launch.workers.outcome import Lost, Outcome

REPEAT_S = 10.0


class JobLink:
    """`fd` becomes readable whenever there is another `word`. Its threads end with the process.

    Args: store  of the job, closed by the caller;  where  its address, for messages;  node  this one;  beat_s  how
          often it beats;  max_missed_beats  how many beats without an answer it bears.
    """

    def __init__(self, store: Store, where: str, node: Node, *, beat_s: float, max_missed_beats: int) -> None:
        self._store = PrefixStore(ROOM, store)
        self._where = where
        self._agent = node.agent
        self._beat_s = beat_s
        self._max_missed_beats = max_missed_beats
        self._num_answers = 0
        self._is_lost = False
        self.has_sent_dumps = False
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._unanswered: list[Report] = []
        self._changed = threading.Condition()
        self._word: Word | None = None
        self._num_words = 0
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        self._beat()
        for target in (self._watch, self._send, self._guard):
            threading.Thread(target=target, name=f"job-link{target.__name__}", daemon=True).start()
        self._report(Came(node))

    def ended(self, round: int, outcome: Outcome) -> None:
        """Say why this node's workers end, without waiting."""
        self._report(Ended(self._agent, round, outcome))

    def stopped(self, round: int) -> None:
        """Say that none of this node's workers is left, without waiting."""
        self._report(Stopped(self._agent, round))

    def tell(self, records: list[Record]) -> None:
        """Have node 0 write down what happened, without waiting; what is reported later it hears later."""
        self._reports.put(Happened(records))

    @property
    def word(self) -> Word | None:
        """Node 0's last word; what is in `fd` is read."""
        try:
            os.read(self.fd, 4096)
        except BlockingIOError:
            pass
        return self._word

    def wait(self, num_seen: int, timeout_s: float) -> tuple[int, Word | None]:
        """Wait until more than `num_seen` words have come, `timeout_s` at most. Returns: how many, and the last."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_words > num_seen, timeout_s)
            return self._num_words, self._word

    def wait_for_end(self, timeout_s: float) -> None:
        """Wait until node 0 has said its last word to this node, `timeout_s` at most."""
        with self._changed:
            self._changed.wait_for(lambda: isinstance(self._word, Done | Refused), timeout_s)

    def awaited(self) -> tuple[int, str]:
        """The number of node 0's messages about awaited nodes, and the last of them; empty: nobody is awaited."""
        try:
            if not self._store.check(["awaited"]):
                return 0, ""
            number, _, text = self._store.get("awaited").decode().partition(" ")
        except StoreError:
            return 0, ""  # The watching thread meets the same and says so.
        return int(number), text

    def lose(self, problem: str) -> None:
        """The store is gone, as this node knows from elsewhere: that is its last word."""
        if not isinstance(self._word, Done | Refused):
            self._is_lost = True
            self._hear(Done(Lost(f"node 0's store at {self._where} went away, and the job with it: {problem}")))

    def send_dumps(self, round: int, packed: bytes) -> None:
        """Have node 0 get this node's dumps of a round."""
        with suppress(StoreError):  # It says then that they did not come.
            self._store.set(f"{_dumps(round)}{self._agent}", packed)
            self.has_sent_dumps = True

    def take_dumps(self, round: int) -> list[bytes]:
        """All nodes' dumps of a round, once."""
        taken = []
        with suppress(StoreError):  # Those that have come are good.
            for key in self._store.list_keys(_dumps(round)):
                taken.append(self._store.get(key))
                self._store.delete_key(key)
        return taken

    def leave(self) -> None:
        """Let node 0 know that this node has heard how it ended."""
        if self._is_lost:
            return
        try:
            self._store.queue_push(REPORTS, encode(Heard(self._agent)))
        except StoreError:
            pass  # Node 0 has gone already.

    def _report(self, report: Report) -> None:
        with self._changed:
            self._unanswered.append(report)
        self._reports.put(report)

    def _send(self) -> None:
        while True:
            report = self._reports.get()
            while True:
                try:
                    if isinstance(report, Came):
                        # For a successor of node 0.
                        self._store.set(f"node/{self._agent}", encode(report))
                    self._store.queue_push(REPORTS, encode(report))
                    break
                except StoreTimeoutError:
                    continue  # A store that is slow to answer is not gone yet; what it heard already may be said again.
                except StoreError:
                    return  # The watching thread meets the same and says so.

    def _watch(self) -> None:
        heard: bytes | None = None
        repeated_s = time.monotonic()
        while not isinstance(self._word, Done | Refused):
            try:
                heard = self._store.watch(f"word/{self._agent}", heard, self._beat_s)
                if heard is None:
                    self.lose("it has gone on without this node, which it did not hear from")
                    return
                self._hear(decode(heard))
                repeated_s = time.monotonic()
            except StoreTimeoutError:
                if time.monotonic() - repeated_s >= REPEAT_S:
                    repeated_s = time.monotonic()
                    self._repeat()
            except (StoreError, ValueError) as error:
                self.lose(_problem(error))
            self._beat()

    def _beat(self) -> None:
        try:
            self._store.add(f"beat/{self._agent}", 1)
            self._num_answers += 1
        except StoreTimeoutError:
            pass  # A store that is slow to answer is not gone yet.
        except StoreError as error:
            self.lose(_problem(error))

    def _guard(self) -> None:
        """Give up when beats have no answer. They are counted: a launcher that was stopped itself blames nobody."""
        num_seen = num_missed = 0
        while num_missed < self._max_missed_beats:
            time.sleep(self._beat_s)
            num_missed = num_missed + 1 if self._num_answers == num_seen else 0
            num_seen = self._num_answers
        self.lose(f"it did not answer for {self._beat_s * self._max_missed_beats:g} s.")

    def _repeat(self) -> None:
        with self._changed:
            unanswered = list(self._unanswered)
        for report in unanswered:
            self._reports.put(report)

    def _hear(self, word: Word) -> None:
        with self._changed:
            self._word = word
            self._num_words += 1
            self._unanswered.clear()
            self._changed.notify_all()
        os.write(self._write_fd, b"!")


def _dumps(round: int) -> str:
    return f"dumps/{round}/"


def _problem(error: StoreError | ValueError) -> str:
    return error.problem if isinstance(error, StoreError) else str(error)
