"""Tells the ranks that share experts when one of them raises, so that they do not wait for its rows."""

from __future__ import annotations

import functools
from typing import Any, Final, cast

from torch import nn

from disttrain._python.made_classes import made_by
from disttrain.errors import DisttrainError
from disttrain.experts.exchange.base import NAME
from disttrain.process_group import ProcessGroup
from disttrain.process_group.watching.refusals import ANY, is_recomputed_enough


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


def tells(module: nn.Module, group: ProcessGroup, name: str = "") -> None:
    """Have `module` tell the ranks of `group`, too, of errors in its forward; those of experts say its name."""
    if not isinstance(module, _Telling):
        module.__class__ = _telling(cast(Any, type(module)))
        setattr(module, _TOLD_GROUPS, ())
        setattr(module, _TOLD_NAME, name or type(module).__name__)
    setattr(module, _TOLD_GROUPS, _Groups((*getattr(module, _TOLD_GROUPS), group)))


def let_tell(module: nn.Module, group: ProcessGroup) -> None:
    """Have `module`, and each module in it that has a layer of experts, where routers raise, tell `group` of errors."""
    for name, part in list(module.named_modules()):
        if part is module or any(is_layer(child) for child in part.children()):
            tells(part, group, name)


def is_layer(module: nn.Module) -> bool:
    """True for a layer of experts."""
    return hasattr(module, "expert_tensors")


class _Groups(tuple[ProcessGroup, ...]):
    __slots__ = ()

    def __deepcopy__(self, _: object) -> _Groups:
        """Themselves: copies of a module tell the same ranks."""
        return self


class _Telling(nn.Module):
    _told_groups: tuple[ProcessGroup, ...]
    _told_name: str


_TOLD_GROUPS: Final = "_told_groups"
_TOLD_NAME: Final = "_told_name"


@functools.cache
def _telling(cls: type[nn.Module]) -> type[nn.Module]:
    # Named here, not by super(): Dynamo does not find that of a class that was made while the program runs.
    as_ever: Any = cast(Any, cls).forward

    def forward(self: _Telling, *args: Any, **kwargs: Any) -> Any:
        try:
            return as_ever(self, *args, **kwargs)
        except Exception as error:
            if not is_recomputed_enough(error):
                if isinstance(error, DisttrainError) and error.operation == NAME and not error.where:
                    error.say_where(self._told_name)
                for group in self._told_groups:
                    tell_of(error, group)
            raise

    # Under the name that it has: reprs and policies go by that.
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    kind = type(cls.__name__, (_Telling, cls), {**names, "forward": functools.wraps(as_ever)(forward)})
    return made_by(kind, _telling, cls)
