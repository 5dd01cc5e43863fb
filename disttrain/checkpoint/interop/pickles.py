"""Pickles as data: read into what they say without doing any of it, and written from that.

Unpickling calls what the pickle names. Here nothing is imported, called or built: a name stays a `Name`, a call a
`Made`, and whoever reads the result decides which of them mean something. So no pickle can run code. The opcodes are
those of protocols 2 to 5, as Python's `pickletools` describes them.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from disttrain.errors import CheckpointError


@dataclass(frozen=True)
class Name:
    """Something that the pickle would import."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Map(list[tuple[Any, Any]]):
    """A dict, as its pairs: a key may be something that was made."""


@dataclass
class Made:
    """What `what` would make of `args`; by its constructor where `is_object`. `state` and `items` are put in later."""

    what: Any
    args: Any
    is_object: bool = False
    state: Any = None
    items: Any = None


@dataclass(frozen=True)
class Persistent:
    """Something that lies outside of the pickle, and what names it."""

    key: Any


class _Mark:
    pass


_BROKEN = (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, MemoryError, struct.error)


def parse(data: bytes, where: str) -> Any:
    """What a pickle says. Raises CheckpointError for what is none, or has opcodes that no torch writes."""
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return machine.stack.pop()
            machine.step(opcode.name, argument)
    except _BROKEN as error:
        raise CheckpointError("load", f"{where} is damaged: {error}.", "Load another save.") from error
    raise CheckpointError("load", f"{where} is damaged: it has no end.", "Load another save.")


class _Machine:
    """The stack and the memo."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        if name in _PUSHES_ITS_ARGUMENT:
            self.stack.append(argument)
        elif name in _PUSHES:
            self.stack.append(_PUSHES[name]())
        elif name in _TAKES:
            self._take(name)
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self.memo[len(self.memo) if name == "MEMOIZE" else argument] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            self.stack.append(self.memo[argument])
        elif name == "GLOBAL":
            self.stack.append(Name(*argument.split(" ")))
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"opcode {name}")

    def _take(self, name: str) -> None:
        num_arguments, then = _TAKES[name]
        if num_arguments is None:
            taken = self._to_mark()
        else:
            taken = self.stack[len(self.stack) - num_arguments :]
            if len(taken) < num_arguments:
                raise IndexError("empty stack")
            del self.stack[len(self.stack) - num_arguments :]
        if name in _CHANGES:
            then(self.stack[-1], taken)
        else:
            self.stack.append(then(taken))

    def _to_mark(self) -> list[Any]:
        at = len(self.stack) - 1
        while not isinstance(self.stack[at], _Mark):
            at -= 1
            if at < 0:
                raise IndexError("no mark")
        taken = self.stack[at + 1 :]
        del self.stack[at:]
        return taken


def _extend(target: Any, taken: list[Any]) -> None:
    if isinstance(target, Made):
        target.items = [*(target.items or []), *taken]
    else:
        target.extend(taken)


def _set_items(target: Any, taken: list[Any]) -> None:
    pairs = list(zip(taken[::2], taken[1::2], strict=True))
    if isinstance(target, Made):
        target.items = Map([*(target.items or []), *pairs])
    elif isinstance(target, Map):
        target.extend(pairs)
    else:
        raise TypeError("no dict")


def _build(target: Any, taken: list[Any]) -> None:
    if not isinstance(target, Made):
        raise TypeError("a state for no object")
    target.state = taken[0]


def _name(taken: list[Any]) -> Name:
    module, name = taken
    if not isinstance(module, str) or not isinstance(name, str):
        raise TypeError("a name that is no text")
    return Name(module, name)


_PUSHES_ITS_ARGUMENT = frozenset({
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
})  # fmt: skip
_PUSHES: dict[str, Callable[[], Any]] = {
    "MARK": _Mark,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": Map,
    "EMPTY_SET": lambda: Made(Name("builtins", "set"), ()),
}
_TAKES: dict[str, tuple[int | None, Callable[..., Any]]] = {
    "TUPLE": (None, tuple),
    "TUPLE1": (1, tuple),
    "TUPLE2": (2, tuple),
    "TUPLE3": (3, tuple),
    "FROZENSET": (None, lambda taken: Made(Name("builtins", "frozenset"), (), items=taken)),
    "STACK_GLOBAL": (2, _name),
    "REDUCE": (2, lambda taken: Made(taken[0], taken[1])),
    "NEWOBJ": (2, lambda taken: Made(taken[0], taken[1], is_object=True)),
    "BINPERSID": (1, lambda taken: Persistent(*taken)),
    "APPEND": (1, _extend),
    "APPENDS": (None, _extend),
    "ADDITEMS": (None, _extend),
    "SETITEM": (2, _set_items),
    "SETITEMS": (None, _set_items),
    "BUILD": (1, _build),
}
_CHANGES = frozenset({"APPEND", "APPENDS", "ADDITEMS", "SETITEM", "SETITEMS", "BUILD"})
"""What they take goes into what lies below it on the stack."""


def dumps(value: Any) -> bytes:
    """A pickle (protocol 2) that says `value`: plain values, and Names, Maps, Mades and Persistents among them.

    Raises CheckpointError for anything else.
    """
    parts: list[bytes] = [b"\x80\x02"]
    _write(value, parts, {})
    return b"".join([*parts, b"."])


def _write(value: Any, parts: list[bytes], names: dict[Name, int]) -> None:
    if value is None or isinstance(value, bool):
        parts.append({None: b"N", True: b"\x88", False: b"\x89"}[value])
    elif type(value) is int:
        parts.append(_integer(value))
    elif type(value) is float:
        parts.append(b"G" + struct.pack(">d", value))
    elif type(value) is str:
        text = value.encode("utf-8", "surrogatepass")
        parts.append(b"X" + struct.pack("<I", len(text)) + text)
    elif type(value) is bytes:  # as protocol 2 has it, without an opcode of its own
        _write(Made(Name("_codecs", "encode"), (value.decode("latin1"), "latin1")), parts, names)
    elif isinstance(value, Name):
        _write_name(value, parts, names)
    elif isinstance(value, dict | Map):
        parts.append(b"}")
        _write_pairs(value.items() if isinstance(value, dict) else value, parts, names)
    elif type(value) is list:
        parts.append(b"](")
        _write_all(value, parts, names)
        parts.append(b"e")
    elif type(value) is tuple:
        parts.append(b"(")
        _write_all(value, parts, names)
        parts.append(b"t")
    elif isinstance(value, Persistent):
        _write(value.key, parts, names)
        parts.append(b"Q")
    elif isinstance(value, Made):
        _write_made(value, parts, names)
    else:
        raise CheckpointError(
            "save", f"a {type(value).__name__} has no place in torch's formats.", "Save plain values and tensors."
        )


def _write_all(values: Any, parts: list[bytes], names: dict[Name, int]) -> None:
    for value in values:
        _write(value, parts, names)


def _write_pairs(pairs: Any, parts: list[bytes], names: dict[Name, int]) -> None:
    parts.append(b"(")
    for pair in pairs:
        _write_all(pair, parts, names)
    parts.append(b"u")


def _write_name(name: Name, parts: list[bytes], names: dict[Name, int]) -> None:
    if name in names:
        parts.append(b"j" + struct.pack("<I", names[name]))
        return
    names[name] = len(names)
    parts.append(f"c{name.module}\n{name.name}\n".encode() + b"r" + struct.pack("<I", names[name]))


def _write_made(made: Made, parts: list[bytes], names: dict[Name, int]) -> None:
    _write(made.what, parts, names)
    _write(made.args, parts, names)
    parts.append(b"\x81" if made.is_object else b"R")
    if made.state is not None:
        _write(made.state, parts, names)
        parts.append(b"b")


def _integer(value: int) -> bytes:
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(raw) < 256:
        return b"\x8a" + bytes([len(raw)]) + raw
    return b"\x8b" + struct.pack("<i", len(raw)) + raw
