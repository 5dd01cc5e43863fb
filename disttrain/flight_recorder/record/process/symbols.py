"""Code objects and offsets as lines and names, and whose code it is: disttrain's, a library's or the user's."""

from __future__ import annotations

import os
import site
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from disttrain.flight_recorder.record.process.callers import Callers

PACKAGE: Final = f"{Path(__file__).parents[3]}/"
"""The folder of disttrain: frames from here are ours, not the user's."""

# `sysconfig` knows more, and takes as long to load as the rest of a recorder's start.
LIBRARIES: Final = tuple(
    dict.fromkeys(
        [
            *(
                f"{folder}/"
                for folder in (*site.getsitepackages(), Path(os.__file__).parent, Path(torch.__file__).parents[1])
            ),
            "<frozen ",
        ]
    )
)
"""Folders of installed libraries: frames from there say less than the user's own."""

Lines = tuple[tuple[str, int, str], ...]
"""File, line and function, innermost first."""


class Symbols:
    """Turns code objects and offsets into lines and names; remembers each, since training is a loop."""

    def __init__(self) -> None:
        # By the address of the code, which is kept beside it: code that Dynamo writes may hold constants that have no
        # hash, and then has none itself.
        self._lines: dict[tuple[int, int], tuple[CodeType, tuple[str, int, str]]] = {}

    def stack(self, callers: Callers) -> Lines:
        """Their lines, without disttrain's own frames."""
        lines = (self._line(code, offset) for code, offset in zip(*callers, strict=True))
        return tuple(line for line in lines if not line[0].startswith(PACKAGE))

    def _line(self, code: CodeType, offset: int) -> tuple[str, int, str]:
        key = id(code), offset
        entry = self._lines.get(key)
        if entry is None:
            entry = self._lines[key] = code, (code.co_filename, _number(code, offset), code.co_qualname)
        return entry[1]


def _number(code: CodeType, offset: int) -> int:
    for start, end, number in code.co_lines():
        if start <= offset < end and number is not None:
            return number
    return code.co_firstlineno
