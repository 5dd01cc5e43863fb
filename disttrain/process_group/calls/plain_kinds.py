"""Python's plain classes that msgpack has no type for: each as a value of lists, numbers and texts, and back.

A class goes by its number, from the table here, never by its name: nothing is looked up that a sender, or a file,
chose.
"""

from __future__ import annotations

import datetime as dt
import pathlib
import uuid
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import torch


class Kind(NamedTuple):
    """A class, what an object of it is made of, and how it is made again; a subclass is another class."""

    of: type
    taken_apart: Callable[[Any], Any]
    put_together: Callable[[Any], Any]


_FACTORIES: dict[str, Callable[[], Any] | None] = {
    "": None,
    **{factory.__name__: factory for factory in (bool, dict, float, int, list, set, str, tuple)},
}


def _defaultdict(parts: Any) -> Any:
    name, pairs = parts
    return defaultdict(_FACTORIES[name], _pairs(pairs))


def _factory_name(value: defaultdict[Any, Any]) -> str:
    for name, factory in _FACTORIES.items():
        if value.default_factory is factory:
            return name
    raise TypeError(f"defaultdict({value.default_factory!r}) makes its values by what cannot be sent")


def _pairs(pairs: Iterable[Any]) -> list[tuple[Any, Any]]:
    return [(key, item) for key, item in pairs]


def _items(value: Any) -> list[list[Any]]:
    return [[key, item] for key, item in value.items()]


def _sorted(value: Any) -> list[Any]:
    """Alike on all ranks, whose hashes of texts differ."""
    return sorted(value, key=lambda item: (type(item).__name__, repr(item)))


def _datetime(value: dt.datetime) -> Any:
    if not isinstance(value.tzinfo, ZoneInfo):
        return value.isoformat()
    return [value.replace(tzinfo=None).isoformat(), value.tzinfo, value.fold]


def _datetime_again(parts: Any) -> dt.datetime:
    if isinstance(parts, str):
        return dt.datetime.fromisoformat(parts)
    text, zone, fold = parts
    return dt.datetime.fromisoformat(text).replace(tzinfo=zone, fold=fold)


def _zone_name(zone: ZoneInfo) -> str:
    if zone.key is None:
        raise TypeError(f"{zone} has no name")
    return zone.key


def _named(kind: type) -> Callable[[str], Any]:
    """From the name of a value that torch has by itself, such as torch.strided, to the value."""

    def find(text: str) -> Any:
        value = getattr(torch, text.removeprefix("torch."), None)
        if not isinstance(value, kind):
            raise ValueError(f"{text} is unknown to this torch")
        return value

    return find


def _plain_dtype(dtype: np.dtype) -> str:
    if dtype.hasobject or dtype.names is not None:
        raise TypeError(f"{dtype} is a dtype of objects, or of fields")
    return dtype.str


KINDS = (
    Kind(set, _sorted, set),
    Kind(frozenset, _sorted, frozenset),
    Kind(complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    Kind(OrderedDict, _items, lambda parts: OrderedDict(_pairs(parts))),
    Kind(Counter, _items, lambda parts: Counter(dict(_pairs(parts)))),
    Kind(defaultdict, lambda value: [_factory_name(value), _items(value)], _defaultdict),
    Kind(range, lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
    Kind(slice, lambda value: [value.start, value.stop, value.step], lambda parts: slice(*parts)),
    Kind(dt.datetime, _datetime, _datetime_again),
    Kind(dt.date, dt.date.isoformat, dt.date.fromisoformat),
    Kind(dt.time, dt.time.isoformat, dt.time.fromisoformat),
    Kind(
        dt.timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: dt.timedelta(*parts),
    ),
    Kind(type(pathlib.Path()), str, pathlib.Path),
    Kind(pathlib.PurePosixPath, str, pathlib.PurePosixPath),
    Kind(Decimal, str, Decimal),
    Kind(Fraction, str, Fraction),
    Kind(uuid.UUID, str, uuid.UUID),
    Kind(torch.Size, list, torch.Size),
    Kind(torch.device, str, torch.device),
    # Of more than 64 bits, which generators of numpy have in their states; others are msgpack's own.
    Kind(int, hex, lambda text: int(text, 16)),
    Kind(deque, lambda value: [list(value), value.maxlen], lambda parts: deque(*parts)),
    Kind(Namespace, vars, lambda names: Namespace(**names)),
    Kind(SimpleNamespace, vars, lambda names: SimpleNamespace(**names)),
    Kind(ZoneInfo, _zone_name, ZoneInfo),
    Kind(dt.timezone, lambda zone: [zone.utcoffset(None), zone.tzname(None)], lambda parts: dt.timezone(*parts)),
    Kind(pathlib.PureWindowsPath, str, pathlib.PureWindowsPath),
    Kind(np.dtype, _plain_dtype, np.dtype),
    Kind(torch.layout, str, _named(torch.layout)),
    Kind(torch.memory_format, str, _named(torch.memory_format)),
)
"""Numbered by their places: new ones come last."""
