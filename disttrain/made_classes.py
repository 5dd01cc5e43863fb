"""Classes that are made while the program runs, whose objects can be pickled: another process makes the class again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Kind = TypeVar("Kind", bound=type)


def made_by(cls: Kind, make: Callable[..., type], *arguments: Any) -> Kind:
    """Has objects of `cls` pickled with the call `make(*arguments)`, which gives the class to whoever reads them.

    An object that has a method `refuse_pickle` may raise there.

    Args: make  a function of a module;  arguments  what can be pickled, and classes that were made so themselves.
    """

    def reduce(self: Any, protocol: Any) -> Any:
        create, arguments, *rest = super(cls, self).__reduce_ex__(max(protocol, 2))
        return _create, tuple(_referred(value, self) for value in (create, *arguments)), *rest

    made: Any = cls
    made._made_by = make, arguments
    made.__reduce_ex__ = reduce
    return cls


def _create(create: Any, *arguments: Any) -> Any:
    create, *arguments = (value.cls if isinstance(value, _ClassReference) else value for value in (create, *arguments))
    return create(*arguments)


def _referred(value: Any, owner: Any = None) -> Any:
    """The value as it can be pickled."""
    return _ClassReference(value, owner) if isinstance(value, type) and "_made_by" in vars(value) else value


class _ClassReference:
    """Stands for a class that was made, of an object if there is an `owner`; copies stand for the same."""

    def __init__(self, cls: Any, owner: Any = None) -> None:
        self.cls = cls
        self._owner = owner

    def __deepcopy__(self, _: object) -> _ClassReference:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Before anything else of the owner, and not where it is copied.
        getattr(self._owner, "refuse_pickle", bool)()
        make, arguments = self.cls._made_by
        return _made_again, (make, *map(_referred, arguments))


def _made_again(make: Callable[..., type], *arguments: Any) -> _ClassReference:
    return _ClassReference(_create(make, *arguments))
