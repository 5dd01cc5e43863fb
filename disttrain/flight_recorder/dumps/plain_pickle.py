"""Reads pickles of plain values only: dicts, lists, tuples, texts, numbers. Torch-free, and pickle-free.

torch writes its flight recorder's dumps so. Python's pickle would make any object, and so run any code, that a file
names; here there is no instruction that makes an object: each of the few below is taken, any other is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

MAX_DEPTH: Final = 1 << 20
"""Of the stack: a file that pushes more than this is no dump."""


def load_plain(data: bytes) -> Any:
    """The value in `data`. Raises ValueError when it is damaged or holds more than plain values."""
    reader = _Reader(data)
    try:
        return reader.value()
    except (IndexError, KeyError, TypeError, struct.error, OverflowError) as error:
        raise ValueError(f"is damaged near byte {reader.place} ({type(error).__name__})") from None
    except UnicodeDecodeError:
        raise ValueError(f"is damaged near byte {reader.place}") from None


class _Reader:
    """A stack machine: `stack` is above the last mark, `marked` are the stacks below."""

    def __init__(self, data: bytes) -> None:
        self.place = 0
        self._data = data
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def value(self) -> Any:
        while True:
            code = self._data[self.place]
            self.place += 1
            if code == _STOP:
                return self._stack.pop()
            instruction = _INSTRUCTIONS.get(code)
            if instruction is None:
                raise ValueError(f"holds more than plain values (instruction {code:#04x} at byte {self.place - 1})")
            instruction(self)
            if len(self._stack) + len(self._marked) > MAX_DEPTH:
                raise ValueError("is nested too deeply, or damaged")

    def unpack(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._data, self.place)
        self.place += struct.calcsize(form)
        return value

    def take(self, size: int) -> bytes:
        taken = self._data[self.place : self.place + size]
        if size < 0 or len(taken) < size:
            raise IndexError
        self.place += size
        return taken

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def text(self, size_form: str) -> None:
        self.push(self.take(self.unpack(size_form)).decode(errors="surrogatepass"))

    def long(self) -> None:
        self.push(int.from_bytes(self.take(self.unpack("<B")), "little", signed=True))

    def mark(self) -> None:
        self._marked.append(self._stack)
        self._stack = []

    def since_mark(self) -> list[Any]:
        above, self._stack = self._stack, self._marked.pop()
        return above

    def tuple_of(self, size: int) -> None:
        parts = [self._stack.pop() for _ in range(size)]
        self.push(tuple(parts[::-1]))

    def append(self, values: list[Any]) -> None:
        if not isinstance(self._stack[-1], list):
            raise TypeError
        self._stack[-1].extend(values)

    def set_items(self, flat: list[Any]) -> None:
        if not isinstance(self._stack[-1], dict):
            raise TypeError
        self._stack[-1].update(zip(flat[::2], flat[1::2], strict=False))

    def put(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def get(self, number: int) -> None:
        self.push(self._memo[number])

    def pop_two(self) -> list[Any]:
        value = self._stack.pop()
        return [self._stack.pop(), value]


_STOP: Final = ord(".")
_INSTRUCTIONS: Final[dict[int, Callable[[_Reader], object]]] = {
    0x80: lambda reader: reader.unpack("<B"),  # which protocol
    0x95: lambda reader: reader.unpack("<Q"),  # a frame of so many bytes
    ord("N"): lambda reader: reader.push(None),
    0x88: lambda reader: reader.push(True),
    0x89: lambda reader: reader.push(False),
    ord("J"): lambda reader: reader.push(reader.unpack("<i")),
    ord("K"): lambda reader: reader.push(reader.unpack("<B")),
    ord("M"): lambda reader: reader.push(reader.unpack("<H")),
    0x8A: _Reader.long,
    ord("G"): lambda reader: reader.push(reader.unpack(">d")),
    ord("X"): lambda reader: reader.text("<I"),
    0x8C: lambda reader: reader.text("<B"),
    ord("("): _Reader.mark,
    ord("]"): lambda reader: reader.push([]),
    ord("}"): lambda reader: reader.push({}),
    ord(")"): lambda reader: reader.push(()),
    0x85: lambda reader: reader.tuple_of(1),
    0x86: lambda reader: reader.tuple_of(2),
    0x87: lambda reader: reader.tuple_of(3),
    ord("t"): lambda reader: reader.push(tuple(reader.since_mark())),
    ord("a"): lambda reader: reader.append([reader._stack.pop()]),
    ord("e"): lambda reader: reader.append(reader.since_mark()),
    ord("s"): lambda reader: reader.set_items(reader.pop_two()),
    ord("u"): lambda reader: reader.set_items(reader.since_mark()),
    ord("q"): lambda reader: reader.put(reader.unpack("<B")),
    ord("r"): lambda reader: reader.put(reader.unpack("<I")),
    0x94: _Reader.memoize,
    ord("h"): lambda reader: reader.get(reader.unpack("<B")),
    ord("j"): lambda reader: reader.get(reader.unpack("<I")),
}
