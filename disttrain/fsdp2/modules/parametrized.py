"""Parametrizations of sharded modules stay: torch would write to the shards before it found that it cannot take them
away from a class that is derived from the parametrized one."""

from __future__ import annotations

import sys

from torch import nn
from torch.nn.utils.parametrize import remove_parametrizations

from disttrain.errors import ShardingError


def keep_parametrizations(module: nn.Module) -> None:
    """Have `remove_parametrizations` of this module refused."""
    parametrizations = getattr(module, "parametrizations", None)
    if type(parametrizations) is nn.ModuleDict:
        parametrizations.__class__ = _Kept


class _Kept(nn.ModuleDict):
    """Those of a sharded module."""

    def __contains__(self, name: str) -> bool:
        # Asked by a function that all who ask about parametrizations call.
        if sys._getframe(2).f_code is remove_parametrizations.__code__:
            raise ShardingError(
                "remove_parametrizations",
                f"{name!r} is a parametrized parameter of a sharded module.",
                "Remove it before fully_shard, or from a plain module that has loaded the whole state.",
            )
        return super().__contains__(name)
