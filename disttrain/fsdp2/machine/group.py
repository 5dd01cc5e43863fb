"""Groups of parameters, each gathered as one message, and what becomes of them. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from enum import Enum
from typing import Protocol


class Param(Hashable, Protocol):
    """The facts about a parameter that the machine asks for."""

    @property
    def is_trained(self) -> bool:
        """Gradients of the gathered parameter are asked for."""

    @property
    def has_grad(self) -> bool:
        """A backward pass has left a gradient that has not been reduced."""


class Facts(Protocol):
    """The facts about a group that the machine asks for. They may change between events, and from rank to rank."""

    @property
    def params(self) -> Sequence[Param]:
        """The parameters of the group."""

    @property
    def has_grads(self) -> bool:
        """A parameter of it has a gradient that has not been reduced."""

    @property
    def has_unreduced(self) -> bool:
        """Earlier backward passes have left gradients to be reduced over the replicas."""

    @property
    def reduces_as(self) -> Hashable:
        """A value that is alike for groups whose gradients may be reduced as one message."""


class Status(Enum):
    """The place of the values of a group's parameters."""

    SHARDED = "on all ranks, each with its shard"
    PART_KEPT = "on few ranks, each with a part that is larger than its shard"
    GATHERING = "on their way"
    UNSHARDED = "all on this rank"


class Buckets:
    """Parameters of a root that are reduced as soon as all of a bucket have a gradient.

    A model's root holds what no block has taken, as a rule the embedding and the head. The head's gradients come first
    in backward, the embedding's last; reduced together they would keep the network idle until the end, and then the
    GPU. Gradients that come later, or that a rank's backward pass does not reach, are reduced when the pass ends. If
    the passes of ranks reach different parameters, their collectives have different orders; this holds for blocks, too.
    """

    def __init__(self, params: Sequence[Sequence[Param]]) -> None:
        self.params = params
        self._missing: list[set[Param]] = [set() for _ in params]

    def begin(self) -> None:
        """A backward pass begins."""
        self._missing = [{param for param in bucket if param.is_trained} for bucket in self.params]

    def is_filled_by(self, number: int, param: Param) -> bool:
        """A parameter of this bucket has a gradient. True where all have one, for the first time in this pass."""
        missing = self._missing[number]
        # Recomputation by a backward pass of its own brings a parameter's gradient in several pieces.
        if param not in missing:
            return False
        missing.remove(param)
        return not missing


class Group:
    """Parameters that are gathered as one message, or with other groups' as one."""

    def __init__(self, facts: Facts, *, keeps_part: bool = True) -> None:
        """`keeps_part`: between forward and backward a part of what is gathered may be kept."""
        self.facts = facts
        self.keeps_part = keeps_part
        self.unit: object = None
        """Groups with the same one are needed at the same time."""
        self.status = Status.SHARDED
        self.gathered_with: Sequence[Group] = ()
        """Groups that are on their way as one message, this one too."""
        self.bundle: Bundle | None = None
        """Groups that are gathered and reduced with this one."""
        self.buckets: Buckets | None = None
        self.reduced: set[Param] = set()
        """Parameters of buckets that this backward pass has reduced already."""
        self.has_taken_part = False
        """The unit's own backward has been here, in a pass that goes on."""
        self.reduces_unused = False
        """Parameters without a gradient are reduced, too."""
        self.reduces_over_replicas = True

    def __getstate__(self) -> dict[str, object]:
        """The state of a deep copy: parameters that are sharded."""
        fresh = {"status": Status.SHARDED, "gathered_with": (), "bundle": None, "buckets": None, "reduced": set()}
        return {**self.__dict__, **fresh, "has_taken_part": False}

    def forget_run(self) -> None:
        """Nothing is gathered or under way."""
        self.status, self.gathered_with = Status.SHARDED, ()
        self.reduced, self.has_taken_part = set(), False

    @property
    def is_unsharded(self) -> bool:
        """True where modules may compute with the gathered parameters."""
        return self.status is Status.UNSHARDED

    @property
    def is_trained(self) -> bool:
        """True once a parameter that gradients are asked for has been gathered."""
        return any(param.is_trained for param in self.facts.params)


class Bundle:
    """Groups that are sent as one message. When the first is needed, all are gathered; when the last has its gradients,
    all are reduced. They belong to small modules that run one after the other, or to one module. Each is freed by
    itself."""

    def __init__(self, groups: Sequence[Group], *, gathers: bool) -> None:
        """`gathers`: also gathers are as one, not reductions alone."""
        self.groups = groups
        self.gathers = gathers
        self._used: list[Group] = []
        """The groups that have been freed, in this order, since all were gathered, or since a forward or backward
        began."""
        self.owed: dict[Group, Sequence[Param]] = {}
        """The parameters that groups whose backward has ended still have to reduce."""
        self.scale: float | None = None

    def begin(self) -> None:
        """A forward or a backward of the whole model begins: all are to come."""
        self._used.clear()

    def forget_run(self) -> None:
        """Nothing is used or owed."""
        self._used.clear()
        self.owed = {}

    def to_gather(self, group: Group) -> Sequence[Group]:
        """Returns the groups to gather when `group` is needed: itself, and those of the others that have not been used
        yet.

        Used ones are left out: a module that runs twice in a row, or is recomputed for its backward, would otherwise
        leave the others unsharded until the backward ends.
        """
        if not self.gathers:
            return (group,)
        if set(self._used).issuperset(self.groups) and self._used[-1].unit is not group.unit:
            # Another round of all.
            self._used.clear()
        used = {each for each in self._used if each.unit is not group.unit}
        return [each for each in self.groups if each is group or (each.status is Status.SHARDED and each not in used)]

    def has_freed(self, group: Group) -> None:
        """The gathered parameters of `group` have been used."""
        if group in self._used:
            self._used.remove(group)
        self._used.append(group)

    @property
    def is_complete(self) -> bool:
        """True where the backward of all has ended, but of those that are not trained: nothing tells of theirs."""
        return all(each in self.owed or not each.is_trained for each in self.groups)

    def take_owed(self) -> list[list[tuple[Group, Sequence[Param]]]]:
        """Returns what is to be reduced, message by message; nothing is owed then."""
        alike: dict[Hashable, list[tuple[Group, Sequence[Param]]]] = {}
        for group in self.groups:
            if params := self.owed.get(group):
                alike.setdefault(group.facts.reduces_as, []).append((group, params))
        self.owed = {}
        return list(alike.values())


def post_forward_mesh_size(num_shards: int, num_ranks: int) -> int:
    """Returns how many of the ranks that share a parameter keep it together between forward and backward, where
    `num_ranks` of the whole mesh are to: where experts have fewer ranks, the next divisor, so that none keeps more."""
    return next(num for num in range(min(num_ranks, num_shards), num_shards + 1) if num_shards % num == 0)
