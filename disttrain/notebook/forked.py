"""Forks of this process as ranks: started, read, waited for, ended."""

from __future__ import annotations

import os
import selectors
import signal
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from typing import Any, Final

from disttrain.notebook.lines import LineReader
from disttrain.notebook.rank import AT_S, ERROR, VALUE, Task, run_rank
from disttrain.process_group.calls.packing import unpack

GRACE_S: Final = 3.0
"""The time that ranks that are to end may take before they are killed."""
_NOTICED_S: Final = 1.0
"""The longest time until a rank's death is noticed: what others say of it meanwhile is not its cause."""
_READ_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class Failure:
    """A rank that failed: when, and its traceback, or how it died."""

    rank: int
    at_s: float
    told: str


class Rank:
    """One fork, and this side's ends of its pipes. To be made by the thread that it is a fork of."""

    def __init__(self, rank: int, task: Task) -> None:
        self.rank = rank
        self.report = b""
        (stdout, stdout_end), (stderr, stderr_end), (report, report_end) = (os.pipe() for _ in range(3))
        self.readers = {stdout: LineReader(), stderr: LineReader(), report: None}
        """By descriptor; None where the report comes."""
        self.stderr = stderr
        self.process = ForkProcess(target=run_rank, args=(task, stdout_end, stderr_end, report_end))
        try:
            self.process.start()
        except OSError:
            self.close()
            raise
        finally:
            # Until then nobody sees that the rank has closed its own, and the next fork would hold them as well.
            for end in (stdout_end, stderr_end, report_end):
                os.close(end)
        for reader in self.readers:
            os.set_blocking(reader, False)

    def send(self, number: signal.Signals) -> None:
        """A signal to the rank and to all that it has started."""
        pid = self.process.pid
        assert pid is not None
        with suppress(ProcessLookupError):
            try:
                os.killpg(pid, number)
            except ProcessLookupError:
                os.kill(pid, number)  # it has not become the leader of its group yet

    def close(self) -> None:
        for reader in self.readers:
            os.close(reader)
        self.readers = {}


class Ranks:
    """All ranks of a job, from their start to their end."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks
        self._ranks: list[Rank] = []
        self._running: set[Rank] = set()
        self._values: dict[int, Any] = {}
        self._failures: list[Failure] = []
        self._is_ending = False
        self._selector = selectors.DefaultSelector()

    def run(self) -> list[Any] | Failure:
        """Returns what they return, by rank, or the first failure, when none of them is left.

        Raises: OSError where they cannot be started; KeyboardInterrupt, when none of them is left.
        """
        try:
            self._start()
            self._wait(None)
            if self._running:
                self._end(signal.SIGTERM)
        except KeyboardInterrupt:
            self._end(signal.SIGINT)
            raise
        finally:
            self._kill()
        if self._failures:
            return min(self._failures, key=lambda failure: failure.at_s)
        return [self._values[rank] for rank in range(len(self._tasks))]

    def _start(self) -> None:
        problems: list[OSError] = []
        # A thread of their own: see rank.py.
        thread = threading.Thread(target=self._fork, args=(problems,), name="disttrain fork")
        thread.start()
        try:
            thread.join()
        finally:
            thread.join()  # also where the first one was interrupted: what it starts must be known
            self._running = set(self._ranks)
            for rank in self._ranks:
                self._selector.register(rank.process.sentinel, selectors.EVENT_READ, rank)
                for reader in rank.readers:
                    self._selector.register(reader, selectors.EVENT_READ, rank)
        if problems:
            raise problems[0]

    def _fork(self, problems: list[OSError]) -> None:
        with warnings.catch_warnings():
            # Python 3.12 and later: a fork of a process with threads has none of them. It needs none.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                for number, task in enumerate(self._tasks):
                    self._ranks.append(Rank(number, task))
            except OSError as error:
                problems.append(error)

    def _wait(self, end_s: float | None) -> None:
        """Until all have ended, until `end_s`; without it, until one has failed."""
        while self._running and (end_s is not None or not self._failures):
            left_s = None if end_s is None else end_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                return
            for key, _ in self._selector.select(left_s):
                if key.fd == key.data.process.sentinel:
                    self._note_end(key.data)
                elif key.fd in key.data.readers:
                    self._read(key.data, key.fd)

    def _end(self, number: signal.Signals) -> None:
        """Have those that are left end by themselves."""
        self._is_ending = True
        for rank in self._running:
            rank.send(number)
        self._wait(time.monotonic() + GRACE_S)

    def _kill(self) -> None:
        """Leave none, nor anything that they have started."""
        self._is_ending = True
        for rank in self._ranks:
            rank.send(signal.SIGKILL)
        for rank in list(self._running):
            self._note_end(rank)
        for rank in self._ranks:
            rank.process.close()
        self._selector.close()

    def _read(self, rank: Rank, reader: int) -> bool:
        """Move one read's worth; False when there is nothing now, or nothing any more."""
        try:
            data = os.read(reader, _READ_BYTES)
        except BlockingIOError:
            return False
        lines = rank.readers[reader]
        if lines is None:
            rank.report += data
        else:
            shown = lines.feed(data, time.monotonic()) if data else lines.end()
            _show(rank.rank, shown, is_error=reader == rank.stderr)
        if not data:
            self._selector.unregister(reader)
            del rank.readers[reader]
            os.close(reader)
        return bool(data)

    def _note_end(self, rank: Rank) -> None:
        """Reads what a rank that has ended left in its pipes, and what it came to."""
        rank.process.join()
        self._running.discard(rank)
        self._selector.unregister(rank.process.sentinel)
        for reader, lines in list(rank.readers.items()):
            while self._read(rank, reader):
                pass
            if reader in rank.readers:  # what it has started holds the other end
                self._selector.unregister(reader)
                _show(rank.rank, lines.end() if lines else [], is_error=reader == rank.stderr)
        rank.close()
        answer = unpack(rank.report) if rank.report else {}
        if VALUE in answer:
            self._values[rank.rank] = answer[VALUE]
        elif ERROR in answer:
            self._failures.append(Failure(rank.rank, answer[AT_S], answer[ERROR]))
        elif not self._is_ending:
            cause = _death(rank.process.exitcode or 0)
            self._failures.append(Failure(rank.rank, time.monotonic() - _NOTICED_S, cause))


def _show(rank: int, lines: Sequence[str], *, is_error: bool) -> None:
    if lines:
        stream = sys.stderr if is_error else sys.stdout
        stream.write("".join(f"[rank {rank}] {line}\n" for line in lines))
        stream.flush()


def _death(exit_code: int) -> str:
    if exit_code >= 0:
        return f"Its process ended with exit code {exit_code}, without a word."
    name = signal.Signals(-exit_code).name
    perhaps = " That is how Linux ends what takes too much memory." if name == "SIGKILL" else ""
    return f"Its process was ended by {name}.{perhaps}"
