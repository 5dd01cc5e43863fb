"""Buckets of a root's parameters that are reduced as one before its backward ends: those of each of its large
children."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from disttrain.fsdp2.params.extensions import ExtensionGroup
from disttrain.fsdp2.params.param import ShardedParam
from disttrain.fsdp2.params.param_group import ParamGroup
from disttrain.fsdp2.transfers.forms import reduce_buckets


def buckets_of(modules: Sequence[nn.Module], group: ParamGroup) -> list[list[ShardedParam]]:
    """The parameters of a root's group by the children of its module that hold them, last child first, as backward
    reaches them. Empty where all are reduced as one."""
    if len(modules) > 1 or isinstance(group, ExtensionGroup):
        return []
    params = group.params
    children = {below: index for index, child in enumerate(modules[0].children()) for below in child.modules()}
    indices = [min(children.get(owner.module, -1) for owner in param.owners) for param in params]
    buckets = reduce_buckets(indices, [param.num_bytes for param in params])
    return [[params[index] for index in bucket] for bucket in buckets] if len(buckets) > 1 else []
