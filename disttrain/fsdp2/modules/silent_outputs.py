"""Modules of whose outputs we find no tensor, or not all: they are in a class of the user's own, in a list that was
given in, or an attribute of the module.

No hook of an output tells that the backward of such a module begins. The gradients of its gathered parameters do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from disttrain.fsdp2.state import ShardState

_TELLS = "_disttrain_tells"


def watch_gradients(state: ShardState, *, may_be_hidden: bool) -> None:
    """Let the first gradient of a gathered parameter begin the model's backward.

    Where `state` is silent, or its outputs have values in which tensors `may_be_hidden`.
    """
    if not (state.unit.is_silent or may_be_hidden):
        return

    def begin(_: object) -> None:
        if state.context is not None and not state.unit.is_scheduled:
            state.context.begin_backward()

    for param in (param for group in state.groups for param in group.params):
        whole = param.unsharded
        if whole is not None and whole.requires_grad and not vars(whole).get(_TELLS):
            whole.register_post_accumulate_grad_hook(begin)
            vars(whole)[_TELLS] = True
