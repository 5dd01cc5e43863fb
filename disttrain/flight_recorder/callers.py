"""The innermost frames of a stack, as code objects and offsets: what tells one stack from another, and costs least.

It runs at every call of every layer, so eight frames are looked at one by one: in a loop, with lists that grow, they
take half as long again. Frames themselves are never kept, since they hold the locals of their functions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import CodeType, FrameType
from typing import Final

Callers = tuple[list[CodeType], tuple[int, ...]]
"""Code objects, innermost first, and at which offset each has called the one before.

Codes are to be compared as lists, which asks for identity first, and not hashed: to hash one takes a microsecond.
Of two files with the same code on the same lines, the first is named.
"""

Walk = tuple[list[CodeType], tuple[int, ...], FrameType | None]
"""Callers, and the frame of the last one."""
Walker = Callable[[FrameType], Walk]

_EIGHT: Final = 8


def walker(num_frames: int) -> Walker:
    """What walks over the innermost `num_frames`, from a frame on, or over all that there are."""
    return eight_callers if num_frames == _EIGHT else partial(callers, num_frames=num_frames)


def eight_callers(first: FrameType) -> Walk:
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
            eighth,
        )
        # fmt: on
    return _one_by_one(first, _EIGHT)


def callers(first: FrameType, num_frames: int) -> Walk:
    """The innermost `num_frames`, from frame `first` on; all where there are fewer."""
    codes: list[CodeType] = []
    offsets: tuple[int, ...] = ()
    frame: FrameType | None = first
    last = None
    while frame is not None and num_frames:
        num = min(num_frames, _EIGHT)
        some_codes, some_offsets, last = eight_callers(frame) if num == _EIGHT else _one_by_one(frame, num)
        codes += some_codes
        offsets += some_offsets
        num_frames -= num
        frame = last.f_back if last is not None and num_frames else None
    return codes, offsets, last


def _one_by_one(first: FrameType, num_frames: int) -> Walk:
    codes, offsets = [], []
    last, frame = None, first
    for _ in range(num_frames):
        codes.append(frame.f_code)
        offsets.append(frame.f_lasti)
        last = frame
        if frame.f_back is None:
            break
        frame = frame.f_back
    return codes, tuple(offsets), last
