"""The innermost frames of a stack, as code objects and offsets: the cheapest key that distinguishes stacks.

It runs at every call of every layer, so eight frames are unrolled: a loop with growing lists takes half as long again.
Frames themselves are never kept, since they hold the locals of their functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import CodeType, FrameType
from typing import Final

Callers = tuple[list[CodeType], tuple[int, ...]]
"""Code objects, innermost first, and at which offset each has called the one before.

Codes are to be compared as lists, which asks for identity first, and not hashed: to hash one takes a microsecond.
Of two files with the same code on the same lines, the first is named.
"""

Walker = Callable[[FrameType], Callers]

EIGHT: Final = 8


def walker(num_frames: int) -> Walker:
    """A function that walks over the innermost `num_frames`, from a frame on, or over all that there are."""
    return eight_callers if num_frames == EIGHT else partial(callers, num_frames)


def eight_callers(first: FrameType) -> Callers:
    """The innermost eight, from frame `first` on; all where there are fewer."""
    if (
        (second := first.f_back) is not None
        and (third := second.f_back) is not None
        and (fourth := third.f_back) is not None
        and (fifth := fourth.f_back) is not None
        and (sixth := fifth.f_back) is not None
        and (seventh := sixth.f_back) is not None
        and (eighth := seventh.f_back) is not None
    ):
        # fmt: off
        return (
            [first.f_code, second.f_code, third.f_code, fourth.f_code,
             fifth.f_code, sixth.f_code, seventh.f_code, eighth.f_code],
            (first.f_lasti, second.f_lasti, third.f_lasti, fourth.f_lasti,
             fifth.f_lasti, sixth.f_lasti, seventh.f_lasti, eighth.f_lasti),
        )
        # fmt: on
    return callers(EIGHT, first)


def are_callers(expected: Sequence[tuple[CodeType, int]], num_frames: int, first: FrameType) -> bool:
    """True if these are the innermost `num_frames` from frame `first` on, each code with its offset.

    To compare takes half the time of a walk that keeps what it finds.
    """
    frame: FrameType | None = first
    for code, offset in expected:
        if frame is None or frame.f_lasti != offset or frame.f_code is not code:
            return False
        frame = frame.f_back
    return frame is None or len(expected) == num_frames


def callers(num_frames: int, first: FrameType) -> Callers:
    """The innermost `num_frames`, from frame `first` on; all where there are fewer."""
    codes: list[CodeType] = []
    offsets: list[int] = []
    frame = first
    for _ in range(num_frames):
        codes.append(frame.f_code)
        offsets.append(frame.f_lasti)
        caller = frame.f_back
        if caller is None:
            break
        frame = caller
    return codes, tuple(offsets)
