"""Objects of a program's own classes that are nothing but data: dataclasses, members of enums, named tuples.

Such an object travels as its class's name and its contents. The name is looked up among the modules that the receiver
has loaded: nothing is imported, and no code of the class runs, neither its `__init__` nor its `__post_init__`. So a
sender can name the receiver's data, and do nothing by it. Files are read without this: they have plain values alone.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import sys
from typing import Any

from disttrain.errors import ShapeError


class Unsendable(TypeError):
    """A value that cannot be packed, and what to send instead."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.remedy = remedy


def taken_apart(value: object) -> list[Any] | None:
    """The class and the contents of an object that is data, as plain values; None of another one.

    Raises: Unsendable for one whose class the receiver could not find, or not build without running its code.
    """
    contents = _contents(value)
    if contents is None:
        return None
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if _found(kind.__module__, kind.__qualname__) is not kind:
        problem = f"{name} is not found by its name: it is defined in a function, or has been replaced"
        raise Unsendable(problem, "Define the class at the top of a module.")
    try:
        _check(kind, name)
    except TypeError as error:
        raise Unsendable(str(error), "Send dataclasses.asdict(value), or its values, and build it there.") from None
    return [kind.__module__, kind.__qualname__, contents]


def put_together(parts: list[Any]) -> Any:
    """The inverse. Raises: ShapeError for a class that this process has not loaded, or that is none of data."""
    module, name, contents = parts
    kind = _found(module, name)
    if not isinstance(kind, type):
        problem = f"a {module}.{name} has come, a class that this process has not loaded."
        raise ShapeError("unpack", problem, f"Import {module} on all ranks, in the same version.")
    try:
        _check(kind, f"{module}.{name}")
        return _filled(kind, contents)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        problem = f"a {module}.{name} has come that this process cannot build: {error}."
        raise ShapeError("unpack", problem, "Have the same version of the program on all ranks.") from None


def _contents(value: object) -> Any:
    if isinstance(value, enum.Enum):
        # A combination of flags has a member for each bit.
        return [value.name] if value.name in type(value).__members__ else [member.name for member in _bits(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        fields = {name: getattr(value, name) for name in names if hasattr(value, name)}
        return {**fields, **getattr(value, "__dict__", {})}
    return None


def _bits(value: enum.Enum) -> list[enum.Enum]:
    members: list[enum.Enum] = [*value] if isinstance(value, enum.Flag) else []
    if not members:
        raise Unsendable(f"{value!r} is no member of its class with a name", "Send its value.")
    return members


def _filled(kind: Any, contents: Any) -> Any:
    if issubclass(kind, enum.Enum):
        return functools.reduce(operator.or_, [kind.__members__[name] for name in contents])
    if issubclass(kind, tuple):
        if len(contents) != len(kind._fields):
            raise ValueError(f"it has {len(contents)} fields")
        return tuple.__new__(kind, contents)
    made = object.__new__(kind)
    for name, item in contents.items():
        # As a frozen dataclass sets its own.
        object.__setattr__(made, name, item)
    return made


def _check(kind: type, name: str) -> None:
    """Raises TypeError for what is no class of data, or runs code by being there."""
    if issubclass(kind, enum.Enum) or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        return
    if not dataclasses.is_dataclass(kind) or kind.__new__ is not object.__new__:
        raise TypeError(f"{name} is no plain dataclass")
    if hasattr(kind, "__del__"):
        raise TypeError(f"{name} does something at its end (__del__)")


def _found(module: str, qualified_name: str) -> Any:
    """Gets what a loaded module has under a name; its classes' attributes are looked at, and none computed."""
    value: Any = sys.modules.get(module)
    for name in qualified_name.split("."):
        value = vars(value).get(name) if hasattr(value, "__dict__") else None
    return value
