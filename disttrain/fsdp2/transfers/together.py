"""Groups of parameters that go over the wire together: gathered, and reduced, as one message each.

The groups are those of modules that run one after the other, and are small, or of one module. Each is freed by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from disttrain.fsdp2.transfers.reducing import reduce_together

if TYPE_CHECKING:
    from disttrain.fsdp2.param import ShardedParam
    from disttrain.fsdp2.param_group import ParamGroup


class Together:
    """Some groups: the first that is needed has all gathered, the last whose gradients are there has all reduced."""

    def __init__(self, groups: Sequence[ParamGroup], *, gathers: bool) -> None:
        """`gathers`: also gathers are as one, not reductions alone."""
        self._groups = groups
        self._gathers = gathers
        self._used: list[ParamGroup] = []
        """What has been freed, in this order, since all were gathered, or since a forward or backward began."""
        self._owed: dict[ParamGroup, Sequence[ShardedParam]] = {}
        """What those have to reduce whose backward has ended."""
        self._scale: float | None = None

    def begin(self) -> None:
        """A forward or a backward of the whole model begins: all are to come."""
        self._used.clear()

    def to_gather(self, group: ParamGroup) -> list[ParamGroup]:
        """What is to be gathered when `group` is needed: it, and those of the others that are still to come.

        What has been used is not: a module that runs twice in a row, or is computed again for its backward, would leave
        the others whole until the backward ends.
        """
        if not self._gathers:
            return [group]
        if set(self._used).issuperset(self._groups) and self._used[-1].module_path != group.module_path:
            # Another round of all.
            self._used.clear()
        used = {each for each in self._used if each.module_path != group.module_path}
        return [each for each in self._groups if each is group or (each.waits_for_gather and each not in used)]

    def has_freed(self, group: ParamGroup) -> None:
        """The gathered parameters of `group` have been used."""
        if group in self._used:
            self._used.remove(group)
        self._used.append(group)

    def reduce(self, group: ParamGroup, params: Sequence[ShardedParam], scale: float | None = None) -> None:
        """The backward of `group` has ended, and these of its parameters are to be reduced, if any. Collective for the
        last of the groups that are trained: nothing tells when a backward is over that never comes to a module."""
        if params or group not in self._owed:
            self._owed[group] = params
        self._scale = scale
        if all(each in self._owed or not each.is_trained for each in self._groups):
            self.flush()

    def flush(self) -> None:
        """Reduce what there is, whichever groups are still to come: the backward pass has ended. Collective."""
        owed = [(group, self._owed[group]) for group in self._groups if self._owed.get(group)]
        self._owed = {}
        alike: dict[object, list[tuple[ParamGroup, Sequence[ShardedParam]]]] = {}
        for group, params in owed:
            alike.setdefault(group.reduces_as, []).append((group, params))
        for each in alike.values():
            reduce_together(each, self._scale)

    def forget(self) -> None:
        """The backward pass has failed."""
        self._owed = {}
