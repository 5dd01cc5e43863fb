"""Modules whose output tensors we cannot find: they are in an object of the user's own class, in a list that was passed
in, or in an attribute of the module.

No hook of an output signals the beginning of such a module's backward. The gradients of its gathered parameters do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from disttrain.fsdp2._torch import call_when_added
from disttrain.fsdp2.params.param_group import ParamGroup

_TELLS = "_disttrain_tells"
_Owner = TypeVar("_Owner")


def watch_gradients(groups: Sequence[ParamGroup], owner: _Owner, begin: Callable[[_Owner], None]) -> None:
    """Let the first gradient of a gathered parameter `begin(owner)` the model's backward."""
    for param in (param for group in groups for param in group.params):
        whole = param.unsharded
        if whole is not None and whole.requires_grad and not vars(whole).get(_TELLS):
            call_when_added(whole, owner, begin)
            vars(whole)[_TELLS] = True
