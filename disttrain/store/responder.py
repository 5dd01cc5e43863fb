"""Questions and notices to all members of a job, through the store; each member has a thread that waits for them.

They are lines that are appended to a key, which all threads watch. So none is missed when several ask at the same time,
and a member that joins late reads the earlier ones. A question says whom it asks, and their answers come in a queue of
its own. Between lines the threads wait in the store. What all members would ask at once, one asks for all: `once`.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence

from disttrain.errors import StoreError, StoreTimeoutError
from disttrain.store.attendance import once
from disttrain.store.base import Store
from disttrain.store.prefix import PrefixStore
from disttrain.store.rank_runs import is_among, to_runs

_IDLE_S = 3600.0
_AGAIN_S = 0.25
_CLOSING_S = 2.0
_QUESTION, _NOTICE = b"?", b"!"


class Responder:
    """Member `rank`: answers with what `answer(about)` returns, over a connection of its own, until it is closed.

    `hear` is given each notice, and again from time to time, ever more rarely, until it returns True. It may be called
    from several threads. `store` is that connection; what others wait for there ends with it.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        answer: Callable[[str], bytes],
        hear: Callable[[bytes], bool] = lambda _: True,
    ) -> None:
        self.store = PrefixStore(name, store).listener()
        self._rank = rank
        self._answer = answer
        self._hear = hear
        self._num_questions = 0
        self._unsettled: list[bytes] = []
        self._thread = threading.Thread(target=self._read_until_closed, name=f"disttrain {name}", daemon=True)
        self._thread.start()
        # A thread that an answer wakes while the interpreter is being taken down can take the process down with it.
        atexit.register(self.close)

    def ask(self, ranks: Sequence[int], timeout_s: float, about: str = "") -> dict[int, bytes]:
        """The answers of those of `ranks` that gave one in time; none when the store is gone. `about` is one line."""
        self._num_questions += 1
        question = f"{self._rank}.{self._num_questions}"
        answers: dict[int, bytes] = {}
        deadline_s = time.monotonic() + timeout_s
        try:
            self.store.append("board", _QUESTION + f"{question} {to_runs(ranks)} {about}\n".encode())
            while len(answers) < len(ranks) and (left_s := deadline_s - time.monotonic()) > 0:
                rank, _, answer = self.store.queue_pop(f"answers/{question}", timeout=left_s).partition(b" ")
                answers[int(rank)] = answer
        except StoreTimeoutError:
            pass  # Those that have come by then are the answer.
        except StoreError:
            return {}
        return answers

    def once(self, name: str, compute: Callable[[], str]) -> str:
        """What `compute` returns on the first member that comes to this `name`, for all members. Raises StoreError."""
        return once(self.store, f"once/{name}", compute)

    def tell(self, notice: bytes, name: str) -> bool:
        """Show all members `notice`, one line, unless one of this name has been shown; False when the store is gone."""
        try:
            if self.store.compare_set(f"notice/{name}", "", notice) == notice:
                self.store.append("board", _NOTICE + notice + b"\n")
        except StoreError:
            return False
        return True

    def hear_again(self) -> None:
        """Hear all notices in this thread, now: those too that the other one has not come to yet."""
        try:
            board = self.store.get("board") if self.store.check(["board"]) else b""
        except StoreError:
            return  # without a store there is nothing to hear
        for line in board.splitlines():
            if line[:1] == _NOTICE:
                self._hear(line[1:])

    def withdraw(self, name: str) -> None:
        """Withdraws the notice of this name."""
        try:
            self.store.set(f"withdrawn/{name}", b"")
        except StoreError:
            return  # nobody is left who could read it

    def is_withdrawn(self, name: str) -> bool:
        return self.store.check([f"withdrawn/{name}"])

    def close(self) -> None:
        """End the thread. Idempotent."""
        atexit.unregister(self.close)
        self.store.close()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSING_S)

    def _read_until_closed(self) -> None:
        board = b""
        again_s = _AGAIN_S
        while True:
            try:
                seen = board
                board = self.store.watch("board", seen or None, again_s if self._unsettled else _IDLE_S) or b""
                again_s = _AGAIN_S
                for line in board[len(seen) :].splitlines():
                    self._read(line[:1], line[1:])
            except StoreTimeoutError:
                again_s = min(2 * again_s, _IDLE_S)
                self._unsettled = [notice for notice in self._unsettled if not self._hear(notice)]
            except StoreError:
                return

    def _read(self, kind: bytes, text: bytes) -> None:
        if kind == _QUESTION:
            question, runs, about = text.decode().split(" ", 2)
            if is_among(runs, self._rank):
                self.store.queue_push(f"answers/{question}", b"%d " % self._rank + self._answer(about))
        elif not self._hear(text):
            self._unsettled.append(text)
