"""Python stacks as values: of all threads now, of an exception. Torch-free."""

from __future__ import annotations

import sys
import threading
import traceback
from typing import Final

from disttrain._python.thread_errors import ThreadErrors
from disttrain.flight_recorder.record.process.thread_state import activities
from disttrain.flight_recorder.record.record import THREAD_FAILED, Failure, Frame, ThreadStack

_MAX_FRAMES: Final = 64
_MAX_MESSAGE_CHARS: Final = 500


def thread_stacks() -> tuple[ThreadStack, ...]:
    """The stacks of all Python threads, but for the one that asks; the main thread always, and first.

    What they are at is found out where the main thread does not ask itself: that takes a moment.
    """
    doing = activities() if threading.current_thread() is not threading.main_thread() else {}
    threads = {thread.ident: thread for thread in threading.enumerate()}
    main_ident, own_ident = threading.main_thread().ident, threading.get_ident()
    stacks = []
    for ident, innermost in sys._current_frames().items():
        if ident == own_ident and ident != main_ident:
            continue
        frames = [
            Frame(frame.f_code.co_filename, line or frame.f_code.co_firstlineno, frame.f_code.co_qualname)
            for frame, line in traceback.walk_stack(innermost)
        ]
        name = threads[ident].name if ident in threads else f"thread {ident}"
        stacks.append(ThreadStack(name, ident == main_ident, tuple(frames[:_MAX_FRAMES]), doing.get(ident, "")))
    return tuple(sorted(stacks, key=lambda thread: not thread.is_main))


def failed_threads(errors: ThreadErrors | None) -> tuple[ThreadStack, ...]:
    """The threads that exceptions have ended, with the exceptions' stacks."""
    return tuple(
        ThreadStack(
            error.thread,
            is_main=False,
            stack=tuple(Frame(*frame) for frame in error.stack[:_MAX_FRAMES]),
            activity=f"{THREAD_FAILED}{error.text}",
        )
        for error in (errors.kept if errors is not None else ())
    )


def failure_of(error: BaseException) -> Failure:
    """`error` as a value; its first line says what, its stack where."""
    frames = [
        Frame(frame.f_code.co_filename, line or frame.f_code.co_firstlineno, frame.f_code.co_qualname)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    try:
        said = str(error)
    except Exception:  # noqa: BLE001  # It is of the user's class, and what ends the process must not hide behind it.
        said = "whose text cannot be had"
    message = said.strip().partition("\n")[0][:_MAX_MESSAGE_CHARS]
    return Failure(type(error).__name__, message, tuple(frames[::-1][:_MAX_FRAMES]))
