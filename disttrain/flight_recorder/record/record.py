"""The words of a dump, as values: a frame, a call site, one operation as seen by one rank, how far a rank has come."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Final, NamedTuple

Shape = tuple[int, ...]

Splits = tuple[tuple[int, ...], ...]

SEND, RECEIVE = "send", "recv"
"""The operations that only two ranks see. All others are collectives of their group."""


class Frame(NamedTuple):
    """One line of a Python stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


Stack = tuple[Frame, ...]
"""Innermost frame first."""


class State(StrEnum):
    """Progress of this rank's host with an operation."""

    ENQUEUED = "enqueued"
    """Handed to the transport; the host has not seen it end."""
    COMPLETED = "completed"
    """The host has waited for it. On CUDA the device may still be at it."""
    FAILED = "failed"
    ON_DEVICE = "on_device"
    """The host has left it, and its device cannot have ended it: others have not come."""
    CONNECTING = "connecting"
    """Not on record yet: it waits for the members of its group to connect."""


@dataclass(frozen=True, slots=True)
class CallSite:
    """The arguments of an operation and the line that calls it: alike for all passes of a loop, so kept once.

    `ranks` are the group's global ranks in group order, `axis_name` is the mesh axis that it was made for; `peer_rank`
    is the global rank of the root, destination or source; `stack` leaves out disttrain's own frames.
    `reduction` is its name, such as MAX, and empty where it is a sum, or nothing is reduced. `splits` are the rows that
    the rank receives from each, and those that it sends to each, where parts are not equal.
    """

    group_name: str
    ranks: tuple[int, ...]
    operation: str
    input_shapes: tuple[Shape, ...]
    output_shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    peer_rank: int | None
    stack: Stack
    axis_name: str = field(default="", compare=False)
    reduction: str = ""
    splits: Splits = ()

    @property
    def group_title(self) -> str:
        """The group's name, with its mesh axis and ranks where it is not the whole world."""
        if self.group_name == "world":
            return self.group_name
        axis = f"axis {self.axis_name}, " if self.axis_name else ""
        return f"{self.group_name} ({axis}{_group_text(_Same(self.ranks))})"

    @property
    def title(self) -> str:
        """The operation, with its reduction where it is no sum."""
        return f"{self.operation} {self.reduction}" if self.reduction else self.operation

    @property
    def is_message(self) -> bool:
        return self.operation in (SEND, RECEIVE)

    @property
    def num_input_elements(self) -> int:
        return sum(math.prod(shape) for shape in self.input_shapes)

    @property
    def num_output_elements(self) -> int:
        return sum(math.prod(shape) for shape in self.output_shapes)

    @property
    def tensors(self) -> str:
        """Such as `float32[8, 4]`, or `float32[8] -> [4]`; empty for a barrier."""
        inputs = ", ".join(map(_shape_text, self.input_shapes))
        outputs = ", ".join(map(_shape_text, self.output_shapes))
        sizes = inputs if inputs == outputs or not outputs else f"{inputs} -> {outputs}" if inputs else outputs
        return "/".join(dict.fromkeys(self.dtypes)) + sizes


class DeviceTimes(NamedTuple):
    """The times at which a rank's device came to an operation, had left it, and began to wait for it.

    None where it has not yet. Not of each operation it is noted when it was left; `waits_s` is None also where it has
    waited from the first.
    By the rank's clock. What is queued on the stream that called it counts: a device comes to an operation when all
    that was queued before is done, and has left it where the stream that waited for it goes on.
    """

    came_s: float | None = None
    left_s: float | None = None
    waits_s: float | None = None


class Record(NamedTuple):
    """One operation as seen by one rank. Times are seconds since the epoch, by this rank's clock.

    `sequence` counts the group's collectives from 1; for a message, those of this operation with this peer there.
    `action`, such as "stage 2 microbatch 5 F", and `module`, a path, say what it was for; empty when nobody has said.
    `device` is None where no device carries it out, or nobody has looked. `waits_s` is when the host began to wait for
    it; None where it has waited from the first, or has not begun to, or nobody has noted it. `replay` says of which
    replay of a recorded step it is a part, such as "replay 3 of step graph 1"; empty where it was called.
    """

    site: CallSite
    sequence: int
    state: State
    enqueued_s: float
    completed_s: float | None = None
    error: str | None = None
    action: str = ""
    module: str = ""
    device: DeviceTimes | None = None
    waits_s: float | None = None
    replay: str = ""

    @property
    def is_queued(self) -> bool:
        """True where the device has not come to it: something that was queued before has not ended."""
        return self.device is not None and self.device.came_s is None

    @property
    def times_s(self) -> tuple[float, float | None]:
        """The times at which the rank came to it and had left it: its device, where it is known and has come, else its
        host."""
        device = self.device
        if device is None or device.came_s is None:
            return self.enqueued_s, self.completed_s
        return device.came_s, device.left_s

    @property
    def wait_s(self) -> tuple[float, float | None]:
        """The begin and the end of the rank's wait for it, by the same clock."""
        began_s, ended_s = self.times_s
        waits_s = self.waits_s if self.device is None or self.device.came_s is None else self.device.waits_s
        return began_s if waits_s is None else max(began_s, waits_s), ended_s


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """The last collective that this rank has entered in one group, also when its record has left the ring.

    `axis_name` is that of the mesh axis which the group was made for; empty when there is none. `connecting` is the
    operation for which this rank waits for the group's members to connect; empty when it does not.
    """

    group_name: str
    ranks: tuple[int, ...]
    last_sequence: int
    axis_name: str = ""
    connecting: str = ""


@dataclass(frozen=True, slots=True)
class ChannelProgress:
    """The number of messages that this rank has started to send to, or receive from, one peer in one group."""

    group_name: str
    operation: str
    peer_rank: int
    last_sequence: int


BESIDE: Final = "disttrain "
"""How the names of disttrain's own threads begin. They wait within it while nobody is in a collective."""


THREAD_FAILED: Final = "failed: "


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """The stack of one Python thread when the dump was made; disttrain's own frames are in it.

    `activity` is what the system said of it: `running`, or the call it slept in; empty where that is not known. Of a
    thread that an exception has ended it is `failed: ` with the exception, and the stack is the exception's.
    """

    name: str
    is_main: bool
    stack: Stack
    activity: str = ""

    @property
    def failure(self) -> str:
        """What has ended it, such as `ValueError: bad batch 17`; empty for a thread that lives."""
        return self.activity.removeprefix(THREAD_FAILED) if self.activity.startswith(THREAD_FAILED) else ""


@dataclass(frozen=True, slots=True)
class Failure:
    """The exception that ended the process, and where it was raised."""

    kind: str
    message: str
    stack: Stack


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [_run_text(first, last) for first, last in runs]
    is_one = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"{'rank' if is_one else 'ranks'} {', '.join(parts) or 'none'}"


class _Same:
    """Ranks that are compared by identity, which takes no longer for more of them."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks

    def __hash__(self) -> int:
        return id(self.ranks)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.ranks is self.ranks


@lru_cache(maxsize=64)
def _group_text(same: _Same) -> str:
    return ranks_text(same.ranks)


def _run_text(first: int, last: int) -> str:
    if first == last:
        return str(first)
    return f"{first}, {last}" if last == first + 1 else f"{first}-{last}"


def _shape_text(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"
