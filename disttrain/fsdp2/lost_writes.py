"""Writes to gathered parameters, which nobody would see again.

Within its own forward a module has the gathered parameters. They are freed behind it, and the shards know nothing of
what was written to them: a plain module would keep it. So it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from disttrain.errors import ShardingError
from disttrain.fsdp2.lone_errors import tell_of
from disttrain.fsdp2.machine.unit import free
from disttrain.fsdp2.runner import run

if TYPE_CHECKING:
    from disttrain.fsdp2.param_group import ParamGroup


def note_values(groups: Sequence[ParamGroup]) -> None:
    """A forward begins: what is written to gathered parameters from now on would be lost."""
    for group in groups:
        group.shown.note_values()


def written_since(groups: Sequence[ParamGroup]) -> list[tuple[ParamGroup, list[str]]]:
    """Which gathered parameters have been written to since the forward began, before they are freed. Writes through
    `.data` leave no trace, unless it was replaced."""
    of_each = [(group, group.shown.written()) for group in groups]
    return [(group, names) for group, names in of_each if names]


def refuse_writes(written: Sequence[tuple[ParamGroup, list[str]]], kind: str) -> None:
    """Raise ShardingError where gathered parameters of a module, of this `kind`, have been written to.

    A rank that has written alone is alone with this error, and tells the others.
    """
    for group, names in written:
        # Where `.data` was replaced, they are no place for the next gather.
        run(free(group.state))
        group._unsharded = None
        error = ShardingError(
            "forward",
            f"{', '.join(names[:3])} of this {kind} has been written to in its forward, where parameters are"
            " gathered ones: what was written would be lost when they are freed.",
            "Write to parameters between forwards, where they are the shards, or keep this one out of fully_shard"
            " by ignored_params (as of nn.Embedding with max_norm).",
            rank=group.sharding.mesh.get_rank(),
        )
        tell_of("forward", error, [group])
        raise error
