"""Checks of values that come from files, which anybody may have written. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, TypeVar

from disttrain.errors import FlightDumpError
from disttrain.flight_recorder.dumps.words import DUMP_VERSION
from disttrain.flight_recorder.record.record import DeviceTimes, Splits

MAX_WORLD_SIZE: Final = 1 << 20
_INT_ONLY: Final = frozenset({int})

T = TypeVar("T")


def checked_header(header: dict[Any, Any]) -> dict[str, Any]:
    """The header's fields for `Dump`. Raises FlightDumpError for a version that this reader does not know."""
    version = as_int(header.get("version"))
    if version > DUMP_VERSION:
        raise FlightDumpError(
            "read_dump", f"has format version {version}; this disttrain-flight knows up to {DUMP_VERSION}"
        )
    rank, world_size = as_int(header.get("rank")), as_int(header.get("world_size"))
    if not 0 <= rank < world_size <= MAX_WORLD_SIZE:
        raise ValueError("a rank outside its world")
    versions, libraries = header.get("versions"), header.get("libraries")
    if not isinstance(versions, dict) or not isinstance(libraries, list):
        raise TypeError("versions or libraries of another type")
    return {
        "rank": rank,
        "world_size": world_size,
        "pid": as_int(header.get("pid")),
        **{name: as_text(header.get(name)) for name in ("job", "host", "reason", "package")},
        **{name: finite(header.get(name)) for name in ("started_s", "dumped_s")},
        **{
            name: None if header.get(name) is None else finite(header[name])
            for name in ("clock_offset_s", "clock_error_s")
        },
        "device_is_busy": header["device_is_busy"] if isinstance(header.get("device_is_busy"), bool) else None,
        "versions": {as_text(name): as_text(version) for name, version in versions.items()},
        "libraries": tuple(map(as_text, libraries)),
    }


def as_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def as_int(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError("not a whole number")
    return value


def as_ints(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not _INT_ONLY.issuperset(map(type, values)):
        raise TypeError("not a list of whole numbers")
    return tuple(values)


def more_of_site(more: Sequence[Any]) -> tuple[str, Splits]:
    """The reduction and the splits of a site, which early versions did not have. Raises TypeError."""
    if len(more) < 2:
        return "", ()
    reduction, splits = more[:2]
    return as_text(reduction), () if splits is None else tuple(map(as_ints, splits))


def finite(value: Any) -> float:
    """The value, if it is one that can be computed with. Raises ValueError."""
    if not isinstance(value, float) or not math.isfinite(value):
        raise ValueError("not a finite number")
    return value


def at(values: Sequence[T], index: Any) -> T:
    """The value at this place, counted from 0. Raises TypeError, IndexError."""
    if not 0 <= as_int(index) < len(values):
        raise IndexError("a number of something that did not come before")
    return values[as_int(index)]


def device_times(value: Any) -> DeviceTimes | None:
    """Reads what a record or replay knows of its device. Raises TypeError, ValueError."""
    if value is None:
        return None
    came_s, left_s, waits_s, *_ = value
    return DeviceTimes(*(None if time_s is None else finite(time_s) for time_s in (came_s, left_s, waits_s)))
