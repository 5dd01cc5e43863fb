"""A sharded model as sizes, and the memory and traffic of a step: the input and output of a rehearsal. Pure."""

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
    """Whether it is gathered directly into its place, and reduced from there."""
    is_trained: bool
    num_uses: int
    """Modules that have it."""
    num_seen: int = 0
    """The number of these that have ended their backward."""
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
    """The bytes that are gathered together, and the number of ranks: a group as the state machine sees it."""

    params: tuple[ParamSizes, ...]
    shard_bytes: int
    sent_bytes: int
    """The shard in the dtype to compute in, or what the parameters' own methods give for it."""
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
    is_of_bytes: bool = False
    """Whether the parameters' own methods give what is sent."""
    kept: tuple[int, int] = (0, 0)
    """Between forward and backward: the number of ranks that keep a part, and its bytes."""
    has_unreduced = False

    @property
    def has_grads(self) -> bool:
        """A parameter has a gradient that has not been reduced."""
        return any(param.has_grad for param in self.params)

    @property
    def is_lone(self) -> bool:
        """True where a rank has nobody to reduce gradients with, and they stay on the device."""
        return self.num_shards == self.num_replicas == 1 and not self.is_offloaded


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
    """The peak of temporary memory during a step or a part of it: `when` it is reached, and its bytes by kind.

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
    """One launch: the number of ranks, the bytes that each of them sends in a ring, and the number of collectives."""

    operation: str
    num_ranks: int
    sent_bytes: int
    num_collectives: int
