"""Python stacks as values: of a recorded call, of all threads now, of an exception."""

from __future__ import annotations

import platform
import sys
import sysconfig
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import CodeType
from typing import Any, Final

import torch

from disttrain import __version__
from disttrain.flight_recorder.record import Failure, Frame, Stack, ThreadStack
from disttrain.flight_recorder.thread_state import activities

PACKAGE: Final = f"{Path(__file__).parents[1]}/"
"""Where disttrain lies: frames from here are ours, not the user's."""

LIBRARIES: Final = tuple(
    dict.fromkeys(
        [
            *(sysconfig.get_path(name) + "/" for name in ("purelib", "platlib", "stdlib", "platstdlib")),
            f"{Path(torch.__file__).parents[1]}/",
            "<frozen ",
        ]
    )
)
"""How the file names of installed libraries begin: frames from there say less than the user's own."""

VERSIONS: Final = {"disttrain": __version__, "torch": str(torch.__version__), "python": platform.python_version()}

_MAX_FRAMES: Final = 64


class Symbols:
    """Turns code objects and offsets into lines and names; remembers each, since training is a loop."""

    def __init__(self) -> None:
        self._stacks: dict[tuple[Any, ...], Stack] = {}
        self._frames: dict[tuple[CodeType, int], Frame] = {}

    def stack(self, raw: Sequence[Any]) -> Stack:
        """The stack of `code, offset, code, offset, ...`, without disttrain's own frames."""
        key = tuple(raw)
        stack = self._stacks.get(key)
        if stack is None:
            frames = (self._frame(code, offset) for code, offset in zip(key[::2], key[1::2], strict=True))
            stack = self._stacks[key] = tuple(frame for frame in frames if not frame.file.startswith(PACKAGE))
        return stack

    def _frame(self, code: CodeType, offset: int) -> Frame:
        frame = self._frames.get((code, offset))
        if frame is None:
            frame = self._frames[code, offset] = Frame(code.co_filename, _line(code, offset), code.co_qualname)
        return frame


def thread_stacks() -> tuple[ThreadStack, ...]:
    """Where all Python threads are now, but for the one that asks; the main thread always, and first.

    What they are at is found out where the main thread does not ask itself: that takes a moment.
    """
    doing = activities() if threading.current_thread() is not threading.main_thread() else {}
    threads = {thread.ident: thread for thread in threading.enumerate()}
    main_ident, own_ident = threading.main_thread().ident, threading.get_ident()
    found = []
    for ident, innermost in sys._current_frames().items():
        if ident == own_ident and ident != main_ident:
            continue
        frames = [
            Frame(frame.f_code.co_filename, line or frame.f_code.co_firstlineno, frame.f_code.co_qualname)
            for frame, line in traceback.walk_stack(innermost)
        ]
        name = threads[ident].name if ident in threads else f"thread {ident}"
        found.append(ThreadStack(name, ident == main_ident, tuple(frames[:_MAX_FRAMES]), doing.get(ident, "")))
    return tuple(sorted(found, key=lambda thread: not thread.is_main))


def failure_of(error: BaseException, max_chars: int) -> Failure:
    """`error` as a value; its first line says what, its stack where."""
    frames = [
        Frame(frame.f_code.co_filename, line or frame.f_code.co_firstlineno, frame.f_code.co_qualname)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    message = str(error).strip().partition("\n")[0][:max_chars]
    return Failure(type(error).__name__, message, tuple(frames[::-1][:_MAX_FRAMES]))


def _line(code: CodeType, offset: int) -> int:
    for start, end, line in code.co_lines():
        if start <= offset < end and line is not None:
            return line
    return code.co_firstlineno
