"""Classes that are made while the program runs, whose objects can be pickled: another process makes the class again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Kind = TypeVar("Kind", bound=type)


def made_by(cls: Kind, make: Callable[..., type], *arguments: Any) -> Kind:
    """Has objects of `cls` pickled with the call `make(*arguments)`, which gives the class to whoever reads them.

    Args: make  a function of a module;  arguments  what can be pickled, and classes that were made so themselves.
    """

    made: Any = cls

    def reduce(self: Any, protocol: Any) -> Any:
        create, arguments, *rest = super(made, self).__reduce_ex__(max(protocol, 2))
        return _create, tuple(map(_referred, (create, *arguments))), *rest

    made._made_by = make, arguments
    made.__reduce_ex__ = reduce
    return cls


def _create(*parts: Any) -> Any:
    create, *arguments = (part.cls if isinstance(part, _ClassReference) else part for part in parts)
    return create(*arguments)


def _referred(value: Any) -> Any:
    """The value as it can be pickled."""
    return _ClassReference(value) if isinstance(value, type) and "_made_by" in vars(value) else value


class _ClassReference:
    """Stands for a class that was made; copies stand for the same."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls

    def __deepcopy__(self, _: object) -> _ClassReference:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        make, arguments = self.cls._made_by
        return _made_again, (make, *map(_referred, arguments))


def _made_again(make: Callable[..., type], *arguments: Any) -> _ClassReference:
    return _ClassReference(_create(make, *arguments))
