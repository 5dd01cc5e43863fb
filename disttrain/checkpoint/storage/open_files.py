"""Files that several threads read: each is opened by the first that needs it, and closed after its last fetch.

A few files that no thread reads at the moment stay open; if all did, a save of many files would take all descriptors.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Self

from disttrain.checkpoint.storage.base import ReadableFile

MOST_IDLE = 64
"""A local file takes two descriptors, and a process has 1024 of them on most machines."""


class _Entry:
    """One file: how it is open, if it is, and for whom."""

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        self.opened: tuple[ReadableFile, ExitStack] | None = None
        self.uses_left = 0
        self.num_users = 0

    def close(self) -> None:
        opened, self.opened = self.opened, None
        if opened is not None:
            opened[1].close()


class OpenFiles:
    """Opens with `open_file`; `names` has each file's name as often as it will be used. A context manager."""

    def __init__(self, open_file: Callable[[str], AbstractContextManager[ReadableFile]], names: Iterable[str]) -> None:
        self._open_file = open_file
        self._entries: defaultdict[str, _Entry] = defaultdict(_Entry)
        for name in names:
            self._entries[name].uses_left += 1
        self._mutex = threading.Lock()
        self._idle: dict[str, None] = {}
        self._errors: dict[str, Exception] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The file that failed gets the error, as in a `with` of its own; no other thread is running any more.
        name = next((name for name, file_error in self._errors.items() if file_error is error), "")
        failed = self._entries.pop(name, None)
        with ExitStack() as others:
            for entry in self._entries.values():
                others.callback(entry.close)
        if failed is not None and failed.opened is not None:
            failed.opened[1].__exit__(kind, error, trace)

    @contextmanager
    def use(self, name: str) -> Iterator[ReadableFile]:
        entry = self._entries[name]
        with self._mutex:
            self._idle.pop(name, None)
        with entry.mutex:
            if entry.opened is None:
                stack = ExitStack()
                entry.opened = stack.enter_context(self._open_file(name)), stack
            file = entry.opened[0]
            entry.num_users += 1
        try:
            yield file
        except Exception as error:
            self._errors[name] = error
            raise
        with entry.mutex:
            entry.num_users -= 1
            entry.uses_left -= 1
            if not entry.uses_left:
                entry.close()
                return
        self._rest(name)

    def _rest(self, name: str) -> None:
        """Keep this file open; close the one that has rested longest, if there are too many."""
        with self._mutex:
            self._idle[name] = None
            oldest = next(iter(self._idle))
            if len(self._idle) <= MOST_IDLE:
                return
            del self._idle[oldest]
        with self._entries[oldest].mutex:
            if not self._entries[oldest].num_users and oldest not in self._errors:
                self._entries[oldest].close()
