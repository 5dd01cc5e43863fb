"""Modules of whose outputs we find no tensor, or not all: they are in a class of the user's own, in a list that was
given in, or an attribute of the module.

No hook of an output tells that the backward of such a module begins. The gradients of its gathered parameters do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from disttrain.fsdp2.params.param_group import ParamGroup

_TELLS = "_disttrain_tells"


def watch_gradients(groups: Sequence[ParamGroup], begin: Callable[[object], None]) -> None:
    """Let the first gradient of a gathered parameter `begin` the model's backward."""
    for param in (param for group in groups for param in group.params):
        whole = param.unsharded
        if whole is not None and whole.requires_grad and not vars(whole).get(_TELLS):
            whole.register_post_accumulate_grad_hook(begin)
            vars(whole)[_TELLS] = True
