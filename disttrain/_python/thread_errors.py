"""Exceptions that have ended threads of this process: another thread may wait for such a one for ever."""

from __future__ import annotations

import threading
import traceback
from dataclasses import dataclass
from typing import Final

_MAX_KEPT: Final = 8
_MAX_CHARS: Final = 500


@dataclass(frozen=True)
class ThreadError:
    """The exception that ended a thread, without its frames, which would keep their variables."""

    thread: str
    text: str
    """Such as `ValueError: bad batch 17`: its first line."""
    stack: tuple[tuple[str, int, str], ...]
    """File, line and function of each frame, the innermost first."""

    def __str__(self) -> str:
        return f"its thread {self.thread} has failed ({self.text})"


class ThreadErrors:
    """Notes from now on what `threading.excepthook` is told, and passes it on to the hook that was there before.

    The first few are kept: what comes later is likelier to come of them.
    """

    def __init__(self) -> None:
        self._kept: list[ThreadError] = []
        self._previous = threading.excepthook
        # One object, so that `close` finds out whether it is still the hook.
        self._hook = self._note
        threading.excepthook = self._hook

    @property
    def kept(self) -> tuple[ThreadError, ...]:
        """In the order in which they came."""
        return tuple(self._kept)

    def close(self) -> None:
        """Leave the hook to whoever had it before, unless another has been put before this one. Idempotent."""
        if threading.excepthook is self._hook:
            threading.excepthook = self._previous

    def _note(self, args: threading.ExceptHookArgs) -> None:
        # `SystemExit` ends a thread silently, and a thread's end need not mean anything then.
        if len(self._kept) < _MAX_KEPT and not issubclass(args.exc_type, SystemExit):
            error = args.exc_value if args.exc_value is not None else args.exc_type()
            said = traceback.TracebackException(args.exc_type, error, args.exc_traceback, lookup_lines=False)
            # A syntax error begins with its place.
            text = [line.strip() for line in said.format_exception_only() if not line.startswith(" ")][:1]
            stack = tuple((frame.filename, frame.lineno or 0, frame.name) for frame in reversed(said.stack))
            name = args.thread.name if args.thread is not None else "of an unknown name"
            self._kept.append(ThreadError(name, "".join(text).partition("\n")[0][:_MAX_CHARS], stack))
        self._previous(args)
