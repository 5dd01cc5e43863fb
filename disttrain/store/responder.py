"""Questions and notices to all members of a job, through the store; each member has a thread that waits for them.

They are lines that are appended to a key, which all threads watch. So none is missed when several ask at the same time,
and a member that joins late reads the earlier ones. A question says whom it asks, and their answers come in a queue of
its own. Between lines the threads wait in the store. What all members would ask at once, one asks for all: `once`.

The lines lie on pages, a key each, so that a long job's questions don't add up. The member that wrote the last line of
a full page closes it with a line that names the next one, onto which it copies the notices, but for those that are
settled: what they asked for is done. What another has appended
behind that line nobody reads: its own thread sees that, and writes it onto the next page. Page 0 then names the page at
which late members begin, and older pages go.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from disttrain._python import at_exit
from disttrain.errors import StoreError, StoreTimeoutError
from disttrain.store.attendance import once
from disttrain.store.base import Store
from disttrain.store.prefix import PrefixStore
from disttrain.store.rank_runs import is_among, to_runs

_IDLE_S = 3600.0
_AGAIN_S = 0.25
_CLOSING_S = 2.0
_MOST_MISSING = 8
_QUESTION, _NOTICE, _SETTLED, _NEXT = b"?", b"!", b"-", b">"
MAX_PAGE_BYTES = 16 << 10
"""Of what need not be copied from a page; a watcher is sent the page again with each line."""


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
        self._missing: dict[str, int] = {}
        """Answers that had not come when this member went on, for its last questions."""
        self._page = 0
        self._posted: dict[bytes, None] = {}
        """Lines of this member that its thread has not read yet."""
        self._read_questions: set[bytes] = set()
        """Those of this page."""
        self._num_settled_bytes = 0
        """Of notices on this page that are settled, and of the lines that say so."""
        self._told: dict[str, bytes] = {}
        """This member's notices, by name, that may yet be settled."""
        self._notices: dict[bytes, None] = {}
        self._unsettled: list[bytes] = []
        self._thread = threading.Thread(target=self._read_until_closed, name=f"disttrain {name}", daemon=True)
        self._thread.start()
        # A thread that an answer wakes while the interpreter is being taken down can take the process down with it.
        at_exit.register(self.close)

    def ask(self, ranks: Sequence[int], timeout_s: float, about: str = "") -> dict[int, bytes]:
        """The answers of those of `ranks` that gave one in time; none when the store is gone. `about` is one line."""
        self._num_questions += 1
        question = f"{self._rank}.{self._num_questions}"
        line = _QUESTION + f"{question} {to_runs(ranks)} {about}\n".encode()
        answers: dict[int, bytes] = {}
        deadline_s = time.monotonic() + timeout_s
        try:
            self._clear_late_answers()
            self._post(line)
            while len(answers) < len(ranks) and (left_s := deadline_s - time.monotonic()) > 0:
                rank, _, answer = self.store.queue_pop(f"answers/{question}", timeout=left_s).partition(b" ")
                answers[int(rank)] = answer
        except StoreTimeoutError:
            # Those that have come by then are the answer.
            self._missing[question] = len(ranks) - len(answers)
        except StoreError:
            return {}
        finally:
            self._posted.pop(line, None)
        return answers

    def once(self, name: str, compute: Callable[[], str]) -> str:
        """Returns on all members what `compute` returns on the first that comes to this `name`. Raises StoreError."""
        return once(self.store, f"once/{name}", compute)

    def tell(self, notice: bytes, name: str) -> bool:
        """Show all members `notice`, one line, unless one of this name has been shown; False when the store is gone."""
        try:
            if self.store.compare_set(f"notice/{name}", "", notice) == notice:
                self._told[name] = notice
                self._post(_NOTICE + notice + b"\n")
        except StoreError:
            return False
        return True

    def hear_again(self) -> None:
        """Hear all notices in this thread, now: those too that the other one has not come to yet."""
        notices = dict(self._notices)
        page: int | None = self._page
        try:
            while page is not None and self.store.check([_key(page)]):
                lines, page = _lines_of(self.store.get(_key(page)))
                notices |= {line[1:]: None for line in lines if line[:1] == _NOTICE}
                for line in lines:
                    if line[:1] == _SETTLED:
                        notices.pop(line[1:], None)
        except StoreError:
            return  # without a store there is nothing to hear
        for notice in notices:
            self._hear(notice)

    def settle(self, name: str) -> None:
        """Withdraws the notice of this name, since what it asked for is done: nobody need hear it any more. For who has
        told it; nothing happens where another has, which does so itself."""
        notice = self._told.pop(name, None)
        if notice is None:
            return
        try:
            self._post(_SETTLED + notice + b"\n")
            self.store.delete_key(f"notice/{name}")
        except StoreError:
            return  # nobody is left who could read it

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
        at_exit.unregister(self.close)
        self.store.close()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSING_S)

    def _has_posted(self, line: bytes) -> bool:
        return line[:1] == _SETTLED and line + b"\n" in self._posted

    def _post(self, line: bytes) -> None:
        self._posted[line] = None
        self.store.append(_key(self._page), line)

    def _clear_late_answers(self) -> None:
        """Takes away what has come to questions of this member after it had gone on."""
        for question in list(self._missing)[:-_MOST_MISSING]:
            del self._missing[question]
        for question, num_missing in list(self._missing.items()):
            num_late = self.store.queue_len(f"answers/{question}")
            for _ in range(num_late):
                self.store.queue_pop(f"answers/{question}", timeout=_CLOSING_S)
            self._missing[question] = num_missing - num_late
            if num_late == num_missing:
                del self._missing[question]

    def _read_until_closed(self) -> None:
        seen = b""
        again_s = _AGAIN_S
        while True:
            try:
                text = self.store.watch(_key(self._page), seen or None, again_s if self._unsettled else _IDLE_S) or b""
                again_s = _AGAIN_S
                seen = self._read_page(text, seen)
            except StoreTimeoutError:
                again_s = min(2 * again_s, _IDLE_S)
                self._unsettled = [notice for notice in self._unsettled if not self._hear(notice)]
            except StoreError:
                return

    def _read_page(self, text: bytes, seen: bytes) -> bytes:
        """Reads the lines of a page that follow those `seen`. Returns: what has been seen of the page to be watched."""
        if not text:  # This thread was so slow that the page has gone.
            self._turn_to(0)
            return b""
        lines, next_page = _lines_of(text.removeprefix(seen))
        settled = {line[1:] for line in lines if line[:1] == _SETTLED}
        is_own = bool(lines) and (lines[-1].startswith(_QUESTION + b"%d." % self._rank) or self._has_posted(lines[-1]))
        for line in lines:
            self._posted.pop(line + b"\n", None)
            if line[:1] != _NOTICE or line[1:] not in settled:
                self._read(line[:1], line[1:])
            else:
                self._num_settled_bytes += len(line)
        if next_page is not None:
            self._turn_to(next_page)
            return b""
        if is_own and sum(map(len, self._read_questions)) + self._num_settled_bytes > MAX_PAGE_BYTES:
            self._close_page(text)
        return text

    def _turn_to(self, page: int) -> None:
        self._page = page
        self._read_questions.clear()
        self._num_settled_bytes = 0
        # Those were written behind the line that names the next page; who writes from now on looks for the page first.
        for line in list(self._posted):
            self.store.append(_key(page), line)

    def _close_page(self, text: bytes) -> None:
        """Unless somebody has written meanwhile, who does it then."""
        page = self._page
        link = _NEXT + b"%d\n" % (page + 1)
        if self.store.compare_set(_key(page), text, text + link) != text + link:
            return
        for notice in list(self._notices):
            self.store.append(_key(page + 1), _NOTICE + notice + b"\n")
        if page:
            self.store.set(_key(0), link)
        if page > 1:
            self.store.delete_key(_key(page - 1))

    def _read(self, kind: bytes, text: bytes) -> None:
        if kind == _NOTICE:
            if text not in self._notices:
                self._notices[text] = None
                if not self._hear(text):
                    self._unsettled.append(text)
        elif kind == _SETTLED:
            self._num_settled_bytes += len(text)
            if text in self._notices:
                del self._notices[text]
                self._num_settled_bytes += len(text)
            self._unsettled = [notice for notice in self._unsettled if notice != text]
        elif text not in self._read_questions:
            self._read_questions.add(text)
            question, runs, about = text.decode().split(" ", 2)
            if is_among(runs, self._rank):
                self.store.queue_push(f"answers/{question}", b"%d " % self._rank + self._answer(about))


def _key(page: int) -> str:
    return f"board/{page}" if page else "board"


def _lines_of(text: bytes) -> tuple[list[bytes], int | None]:
    """The lines of a page, or of its end, and the page that follows it, where it is closed."""
    lines = text.splitlines()
    for index, line in enumerate(lines):
        if line[:1] == _NEXT:
            return lines[:index], int(line[1:])
    return lines, None
