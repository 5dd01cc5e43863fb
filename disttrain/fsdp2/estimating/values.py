"""A sharded model as sizes, and what a step of it takes: what a rehearsal is given, and what it gives. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

WHOLE, WHOLE_GRADIENTS = "whole parameters", "whole gradients"
PACKED, REDUCED, GATHERED = "packed gradients", "reduced gradients", "being gathered, or kept for it"


@dataclass(frozen=True, eq=False)
class ParamSizes:
    """Bytes of one parameter: whole, its gradient as it is kept from microbatch to microbatch, for all ranks as it is
    reduced, this rank's part of that, and of the gradient."""

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


@dataclass(frozen=True, eq=False)
class GroupSizes:
    """Bytes of what is gathered together, and over how many ranks."""

    params: tuple[ParamSizes, ...]
    early_parts: tuple[tuple[ParamSizes, ...], ...]
    """What of a root is reduced as soon as its gradients are there; fewer than two: nothing is."""
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
    reduces_as: object
    """What must be alike where reductions are as one."""


@dataclass(frozen=True, eq=False)
class SetSizes:
    """Groups that are reduced as one message, and gathered so, too, where `gathers`."""

    groups: tuple[GroupSizes, ...]
    gathers: bool


Use = tuple[GroupSizes, ParamSizes]


@dataclass(eq=False)
class SizedModule:
    """A sharded module: what its forward comes across, in order, and what is gathered when."""

    name: str
    groups: list[GroupSizes]
    body: list[SizedModule | Use] = field(default_factory=list)
    frees_after_forward: bool = True
    kept_on: int | None = None
    gathers_in_backward: bool = True
    forward_prefetch: list[SizedModule] | None = None
    backward_prefetch: list[SizedModule] | None = None


@dataclass(frozen=True)
class Peak:
    """The largest sum of what comes and goes during a step: `when`, and bytes by kind."""

    when: str
    by_kind: dict[str, int]

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
