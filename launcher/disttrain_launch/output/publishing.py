"""Tells whoever looks how this node's workers are, and on node 0 how the job stands: about once a second, in a thread.

Where the launcher's screen shows a table, the same thread looks and draws it, off the agent's event loop. Nothing of it
is needed for training: a store that does not answer is asked again, one that is gone ends it.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from disttrain.errors import StoreError, StoreTimeoutError
from disttrain.store import PrefixStore
from disttrain.store.base import Store
from disttrain_launch.output.streams.workers import Output
from disttrain_launch.output.view import JobState, NodeState, look, tell_job, tell_node
from disttrain_launch.rendezvous.node0 import ROOM
from disttrain_launch.workers.board import Board

EVERY_S = 1.0
Connect = Callable[[], AbstractContextManager[Store]]
_TABLE_SHARE = 3
"""The table takes one of so many rows of the terminal, at most."""


class TableFeed:
    """A table on its way to the event loop: `fd` becomes readable when there is another one."""

    def __init__(self, *, is_coloured: bool) -> None:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)
        self.is_coloured = is_coloured
        self._lines: Sequence[bytes] = ()

    def show(self, output: Output) -> None:
        """Draw the last one; what is in `fd` is read."""
        try:
            os.read(self.fd, 4096)
        except BlockingIOError:
            pass
        output.show_table(self._lines)

    def put(self, lines: Sequence[bytes]) -> None:
        self._lines = lines
        try:
            os.write(self._write_fd, b"!")
        except BlockingIOError:
            pass  # There is a byte already.


class Telling:
    """Args: connect  gives the store that others look into, once there is something to tell;  agent  of this node;
    job  how the job stands, where that is known, on node 0;  feed  takes the table, where there is one.
    """

    def __init__(
        self,
        connect: Connect,
        agent: str,
        board: Board,
        job: Callable[[], JobState | None],
        feed: TableFeed | None,
    ) -> None:
        self._connect = connect
        self._agent = agent
        self._board = board
        self._job = job
        self._feed = feed
        self._is_over = threading.Event()
        self._node_told: NodeState | None = None
        self._job_told: JobState | None = None
        self._known: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="telling", daemon=True)

    def start(self) -> None:
        """Return at once; nothing is told in the first second, so that short jobs cost nothing."""
        self._thread.start()

    def stop(self) -> None:
        """Tell no more."""
        self._is_over.set()
        self._thread.join(EVERY_S)

    def _run(self) -> None:
        try:
            if not self._is_over.wait(EVERY_S):
                with self._connect() as store:
                    self._tell_on(PrefixStore(ROOM, store))
        except (StoreError, OSError):
            pass  # Where the job needs the store as well, others say so.

    def _tell_on(self, store: Store) -> None:
        while True:
            try:
                self._tell(store)
                self._draw(store)
            except StoreTimeoutError:
                pass  # It is slow to answer, and is asked again.
            if self._is_over.wait(EVERY_S):
                return

    def _tell(self, store: Store) -> None:
        if (node := self._board.state()) != self._node_told:
            tell_node(store, self._agent, node)
            self._node_told = node
        if (job := self._job()) is not None and job != self._job_told:
            tell_job(store, job, self._known)
            self._job_told = job

    def _draw(self, store: Store) -> None:
        if self._feed is None or (sight := look(store)) is None:
            return
        from disttrain_launch.output.terminal.table import (  # a launcher that shows none shall start without it
            drawn,
            table_of,
        )

        size = shutil.get_terminal_size()
        table = table_of(sight, time.time(), max_rows=max(size.lines // _TABLE_SHARE, 3))
        self._feed.put(drawn(table, size.columns, is_coloured=self._feed.is_coloured))
