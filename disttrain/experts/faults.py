"""Tells the ranks that share experts when one of them raises, so that they do not wait for its rows."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from disttrain.errors import DisttrainError
from disttrain.experts.exchange.base import NAME, Exchange
from disttrain.process_group import ProcessGroup
from disttrain.process_group.watching.refusals import ANY


def tell_of(error: Exception, group: ProcessGroup) -> None:
    """This rank is about to raise `error`, and will not come to the exchanges that the others are in.

    If all ranks raise, none waits, and nothing happens.
    """
    if group.group_size == 1 or group.ended_by or group.num_refused.get(group.sequence + 1):
        return
    try:
        group.refuse(NAME, error, ANY)
    except DisttrainError as reason:
        error.add_note(f"The other ranks could not be told: {reason}")


def tells(module: nn.Module, exchange: Exchange) -> None:
    """Have `module` tell the exchange's ranks of errors in its forward."""
    if not isinstance(module, _Telling):
        module.__class__ = _telling(type(module))
    module._told_exchange = exchange  # type: ignore[assignment]


class _Telling(nn.Module):
    _told_exchange: Exchange

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*args, **kwargs)
        except Exception as error:
            tell_of(error, self._told_exchange.group)
            raise


@functools.cache
def _telling(cls: type[nn.Module]) -> type[nn.Module]:
    # Under the name that it has: reprs and policies go by that.
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (_Telling, cls), names)
