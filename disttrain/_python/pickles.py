"""Reads pickles as data, without doing what they say. Without torch, and without Python's `pickle`.

Unpickling calls whatever the pickle names. Here nothing is imported, called or built: a name stays a `Name`, a call a
`Made`, and the caller decides which of them mean something. So no pickle can run code. The opcodes are those of
protocols 2 to 5, as Python's `pickletools` describes them.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

MAX_DEPTH: Final = 1 << 20
"""Of the stack: no program writes a pickle that pushes more than this."""
MAX_NESTED: Final = 500
"""Values within values: who walks through them calls itself for each level."""
MAX_VALUES: Final = 1 << 20
"""That a pickle of any size may come to; a larger one may come to `_VALUES_PER_BYTE` for each of its bytes."""
_VALUES_PER_BYTE: Final = 16


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
    """The result of calling `what` with `args`; by its constructor where `is_object`.

    `state` and `items` are put in later.
    """

    what: Any
    args: Any
    is_object: bool = False
    state: Any = None
    items: Any = None


@dataclass(frozen=True)
class Persistent:
    """Something that lies outside of the pickle, and the key that names it."""

    key: Any


class _Mark:
    pass


_BROKEN = (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, MemoryError, struct.error)


def parse(data: bytes) -> Any:
    """The value of a pickle, as data. Raises ValueError for a damaged one, and for opcodes that no torch writes."""
    return _parsed(data, _Machine(Map))


def parse_plain(data: bytes) -> Any:
    """The value of a pickle that has dicts, lists, tuples, texts and numbers alone.

    Raises ValueError for a damaged one, and for one that holds more.
    """
    return _parsed(data, _PlainMachine(dict))


def _parsed(data: bytes, machine: _Machine) -> Any:
    position: int | None = 0
    try:
        for opcode, argument, position in pickletools.genops(data):
            if opcode.name == "STOP":
                value = machine.stack.pop()
                _check_extent(value, max(MAX_VALUES, _VALUES_PER_BYTE * len(data)))
                return value
            machine.step(opcode, argument, position)
    except _Refused as error:
        raise ValueError(str(error)) from None
    except _BROKEN as error:
        raise ValueError(f"is damaged near byte {position} ({error})") from None
    raise ValueError("is damaged: it has no end")


def _check_extent(root: Any, max_values: int) -> None:
    """Raises _Refused for what nobody can walk through: thirty lists that hold the next one twice are a billion values.

    Each container is looked at once, however many hold it.
    """
    num_values: dict[int, int] = {}
    """By id, with what is within; 0 while that is being counted."""
    entered, left_to_see = 0, [(root, False)]
    while left_to_see:
        node, is_left = left_to_see.pop()
        parts = _parts(node)
        if is_left:
            entered -= 1
            num_values[id(node)] = total = 1 + sum(num_values.get(id(part), 1) for part in parts)
            if total > max_values:
                raise _Refused(f"holds some values so often that written out it has more than {max_values}")
        elif num_values.get(id(node)) == 0:
            raise _Refused("has a value that holds itself")
        elif parts and id(node) not in num_values:
            entered += 1
            if entered > MAX_NESTED:
                raise _Refused(f"has values within values, more than {MAX_NESTED} deep")
            num_values[id(node)] = 0
            left_to_see.append((node, True))
            left_to_see.extend((part, False) for part in parts)


def _parts(node: Any) -> Sequence[Any]:
    """The values that a container holds."""
    if isinstance(node, list | tuple):
        return node
    if isinstance(node, dict):
        return [*node.keys(), *node.values()]
    if isinstance(node, Made):
        return (node.what, node.args, node.state, node.items)
    return (node.key,) if isinstance(node, Persistent) else ()


class _Refused(Exception):
    """A pickle that is whole, but holds more than is read."""


class _Machine:
    """The stack and the memo. Dicts become `dict_type`."""

    def __init__(self, dict_type: type[Map | dict[Any, Any]]) -> None:
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._dict_type = dict_type

    def step(self, opcode: pickletools.OpcodeInfo, argument: Any, position: int | None) -> None:
        name = opcode.name
        if name in _PUSHES_ITS_ARGUMENT:
            self.stack.append(argument)
        elif name in _PUSHES:
            self.stack.append(_PUSHES[name]())
        elif name == "EMPTY_DICT":
            self.stack.append(self._dict_type())
        elif name in _TAKES:
            self._take(name)
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if name == "MEMOIZE" else argument] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            self.stack.append(self._memo[argument])
        elif name == "GLOBAL":
            self.stack.append(Name(*argument.split(" ")))
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"opcode {name} at byte {position}")
        if len(self.stack) > MAX_DEPTH:
            raise ValueError("nested too deeply")

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


class _PlainMachine(_Machine):
    """Refuses all that would import or call something."""

    def step(self, opcode: pickletools.OpcodeInfo, argument: Any, position: int | None) -> None:
        if opcode.name not in _PLAIN:
            raise _Refused(f"holds more than plain values (instruction {ord(opcode.code):#04x} at byte {position})")
        super().step(opcode, argument, position)


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
    elif isinstance(target, dict):
        target.update(pairs)
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
"""Opcodes whose arguments go into the value below them on the stack."""
_PLAIN = frozenset({
    "PROTO", "FRAME", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "BINUNICODE", "SHORT_BINUNICODE", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
    "APPEND", "APPENDS", "SETITEM", "SETITEMS", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET",
})  # fmt: skip
