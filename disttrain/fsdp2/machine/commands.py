"""The commands of the machine. Whoever carries one out need not decide anything. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from disttrain.fsdp2.machine.group import Group, Param


class Gather(NamedTuple):
    """Start to gather these groups as one message, because `needed` is needed."""

    needed: Group
    groups: Sequence[Group]


class Wait(NamedTuple):
    """Wait for the gather of `group`, and perhaps of others with it, before anything else is computed."""

    group: Group


class Show(NamedTuple):
    """Put the gathered parameters into the modules; no effect if they are there."""

    group: Group


class Hide(NamedTuple):
    """Put the shards into the modules; no effect if they are there."""

    group: Group


class Free(NamedTuple):
    """Give the memory of the gathered parameters back, but for this rank's part where `keep_on` neighbouring ranks
    are to hold them together until the next gather. Modules have the shards."""

    group: Group
    keep_on: int | None


class DropPart(NamedTuple):
    """Give that part back."""

    group: Group


class KeepGrads(NamedTuple):
    """Keep the gradients of this backward pass for one that reduces."""

    group: Group


class DropGrads(NamedTuple):
    """Forget gradients that have not been reduced."""

    group: Group


class Reduce(NamedTuple):
    """Start to reduce the gradients of these parameters as one message.

    A schedule gives `scale`; then all trained parameters receive a gradient. `named` is the group whose backward has
    ended just now.
    """

    parts: Sequence[tuple[Group, Sequence[Param]]]
    scale: float | None
    named: Group | None


class Finish(NamedTuple):
    """Wait for the reductions that were started, and give the shards their gradients.

    `but_last_sum`: the last one's sum over the replicas may go on beside the next reduction. `if_partial`: only where
    one of them is not over the replicas yet. `named` as of `Reduce`.
    """

    but_last_sum: bool = False
    if_partial: bool = False
    named: Group | None = None


class Settle(NamedTuple):
    """All gradients have been reduced: wait for copies to the host, call hooks, release the last gathered buffer. The
    cast shards that an optimizer has written for gathers of these groups are out of date."""

    groups: Sequence[Group]


class FinishUpload(NamedTuple):
    """Wait until shards on the host, which gathers read, may be written to."""


class DropReductions(NamedTuple):
    """Wait for the reductions under way, and forget what they bring."""


Command: TypeAlias = (
    Gather | Wait | Show | Hide | Free | DropPart
    | KeepGrads | DropGrads | Reduce | Finish | Settle | FinishUpload | DropReductions
)  # fmt: skip
Commands: TypeAlias = Iterator[Command]
