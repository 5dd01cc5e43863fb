"""Files that several threads read: each is opened by who needs it first and closed after its last fetch."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Self

from disttrain.checkpoint.storage import ReadableFile


class OpenFiles:
    """Opens with `open_file`; `names` has each file's name as often as it will be used. A context manager."""

    def __init__(self, open_file: Callable[[str], AbstractContextManager[ReadableFile]], names: Iterable[str]) -> None:
        self._open_file = open_file
        self._uses_left = Counter(names)
        self._locks = {name: threading.Lock() for name in self._uses_left}
        self._files: dict[str, tuple[ReadableFile, ExitStack]] = {}
        self._failed = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The file that could not be used hears why, as in a `with` of its own; no other thread is at work any more.
        with ExitStack() as others:
            for name, (_, stack) in self._files.items():
                if name != self._failed:
                    others.push(stack)
        if self._failed in self._files:
            self._files[self._failed][1].__exit__(kind, error, trace)

    @contextmanager
    def use(self, name: str) -> Iterator[ReadableFile]:
        with self._locks[name]:
            if name not in self._files:
                stack = ExitStack()
                self._files[name] = stack.enter_context(self._open_file(name)), stack
            file, stack = self._files[name]
        try:
            yield file
        except Exception:
            self._failed = name
            raise
        with self._locks[name]:
            self._uses_left[name] -= 1
            if not self._uses_left[name]:
                del self._files[name]
                stack.close()
