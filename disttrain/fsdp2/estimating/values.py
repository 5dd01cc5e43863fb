"""A sharded model as sizes, and what a step of it takes: what a rehearsal is given, and what it gives. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import cast

from disttrain.fsdp2.machine.group import Group
from disttrain.fsdp2.machine.unit import Unit

UNSHARDED, UNSHARDED_GRADIENTS = "unsharded parameters", "unsharded gradients"
PACKED, REDUCED, GATHERED = "packed gradients", "reduced gradients", "being gathered, or kept for it"


@dataclass(eq=False)
class ParamSizes:
    """Bytes of one parameter: whole, its gradient as it is kept from microbatch to microbatch, for all ranks as it is
    reduced, this rank's part of that, and of the gradient. And which gradients there are in a rehearsal."""

    whole_bytes: int
    kept_bytes: int
    packed_bytes: int
    reduced_bytes: int
    gradient_bytes: int
    sent_bytes: int
    """This rank's part of what is gathered, in the dtype to compute in."""
    is_in_place: bool
    """Gathered right into its place, and reduced from it."""
    is_trained: bool
    num_uses: int
    """Modules that have it."""
    num_seen: int = 0
    """Of these, whose backward is over."""
    has_unsharded_gradient: bool = False
    has_kept_gradient: bool = False
    has_gradient: bool = False
    """This rank's part of it, once it has been reduced."""

    @classmethod
    def of(
        cls,
        numel: int,
        padded_numel: int,
        num_shards: int,
        itemsizes: tuple[int, int, int],
        *,
        is_in_place: bool,
        is_trained: bool = True,
        num_uses: int = 1,
    ) -> ParamSizes:
        """`itemsizes`: of the shard, of what is computed with, and of what is reduced."""
        stored, compute, reduce = itemsizes
        shard_numel = padded_numel // num_shards
        return cls(
            whole_bytes=numel * compute,
            kept_bytes=numel * reduce,
            packed_bytes=padded_numel * reduce,
            reduced_bytes=shard_numel * reduce,
            gradient_bytes=shard_numel * stored,
            sent_bytes=shard_numel * compute,
            is_in_place=is_in_place,
            is_trained=is_trained,
            num_uses=num_uses,
        )

    @property
    def has_grad(self) -> bool:
        """A gradient is there that has not been reduced."""
        return self.has_unsharded_gradient or self.has_kept_gradient


@dataclass(eq=False)
class GroupSizes:
    """Bytes of what is gathered together, and over how many ranks: what the machine is told of a group."""

    params: tuple[ParamSizes, ...]
    shard_bytes: int
    sent_bytes: int
    """The shard in the dtype to compute in, or what parameters say themselves is gathered of it."""
    whole_bytes: int
    num_shards: int
    num_replicas: int
    cast_bytes: int
    """Made of the shard before it is sent."""
    is_offloaded: bool
    gathered_as: object
    """Its dtype."""
    may_be_in_place: bool
    reduces_as: Hashable
    kept: tuple[int, int] = (0, 0)
    """Between forward and backward: on how many ranks a part is kept, and its bytes."""
    has_unreduced = False


def sizes_of(group: Group) -> GroupSizes:
    """Returns the sizes behind a group of a rehearsal's machine."""
    return cast(GroupSizes, group.facts)


Use = tuple[Group, ParamSizes]


@dataclass(eq=False)
class SizedModule:
    """A sharded module: what its forward comes across, in order."""

    name: str
    unit: Unit
    body: list[SizedModule | Use] = field(default_factory=list)

    def modules(self) -> Iterator[SizedModule]:
        """This one and those in it, in the order in which they run."""
        yield self
        for part in self.body:
            if isinstance(part, SizedModule):
                yield from part.modules()


@dataclass(frozen=True)
class Peak:
    """The largest sum of what comes and goes during a step, or a stretch of it: `when`, and bytes by kind.

    `num_kept`: modules below the root that have begun their forward and not ended their backward, and so keep
    activations; `is_backward`: the last of these is in its backward.
    """

    when: str
    by_kind: dict[str, int]
    num_kept: int = 0
    is_backward: bool = False

    @property
    def num_bytes(self) -> int:
        """All kinds together."""
        return sum(self.by_kind.values())


@dataclass(frozen=True, order=True)
class Message:
    """One launch: over how many ranks, how many bytes each of them sends round a ring, and as how many collectives."""

    operation: str
    num_ranks: int
    sent_bytes: int
    num_collectives: int
