"""Refuses a backward whose forward has computed with other parameter values than the present ones.

Between the two, parameters are freed and gathered again. If an optimizer or a load has written to them meanwhile, the
new values would be combined with the activations of the old ones, which gives wrong gradients. For a plain module
autograd refuses this, by the versions of the parameters it has saved. Here the versions of the shards are compared.

Parameters that have stayed gathered since that forward are unchanged and allowed, but their gradients have the old
dtype and device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from disttrain.dtensor.views.data import num_data_writes
from disttrain.errors import ShardingError
from disttrain.fsdp2.faults.lone_errors import tell_of
from disttrain.fsdp2.params.param import versions

if TYPE_CHECKING:
    from disttrain.fsdp2.machine.group import Group
    from disttrain.fsdp2.params.param_group import ParamGroup


def written_to(groups: Sequence[ParamGroup]) -> list[Group]:
    """Those whose shards have been written to, as by an optimizer, since they were gathered."""
    return [
        group.state
        for group in groups
        if group.gathered != versions(group.params, group._flat) or _has_other_data(group)
    ]


def _has_other_data(group: ParamGroup) -> bool:
    """True where, since the last forward, shards have been written to through `.data`, or have been given other."""
    is_moved = group._laid_out is not None and not all(param.is_in_place() for param in group.params)
    return is_moved or group.shown.num_data_writes != num_data_writes(param.sharded for param in group.params)


def refuse_stale(groups: Sequence[ParamGroup], gathered: Sequence[object], kind: str) -> None:
    """Raise ShardingError where other values have been gathered for a backward than `gathered` for its forward, in
    turn those of `groups`, which are a module's, of this `kind`.

    A rank that has written to its shard alone is alone with this error, and tells the others.
    """
    for group, expected in zip(groups, gathered, strict=True):
        is_converted = _is_converted(group)
        if group.gathered == expected and not is_converted:
            continue
        done = "converted" if is_converted else "written to"
        error = ShardingError(
            "backward",
            f"parameters of {kind}, such as {group.params[0].fqn}, have been {done} since the forward that this"
            " backward belongs to, which has computed with what they were.",
            "Let optimizers step, load and convert when all backwards of earlier forwards are over.",
            rank=group.sharding.mesh.get_rank(),
        )
        tell_of("backward", error, [group])
        raise error


def _is_converted(group: ParamGroup) -> bool:
    """True where shards have become of another dtype or device since they were laid out."""
    laid_out = group._laid_out
    if laid_out is None or laid_out.holds():
        return False
    return not all(param.is_as_laid_out() for param in group.params)
