"""Modules whose gathers, frees and reductions a schedule decides, as that of a pipeline does.

    stage.set_is_scheduled(True)       # once; from then on a forward or backward gathers, frees and reduces nothing
    stage.unshard_all()                # all gathers start; each forward and backward waits for its own module's
    ...                                # forwards and backwards of any microbatches; backwards may be split in two
    stage.reshard_all()                # the gradients of whole parameters stay, and are added to after the next unshard
    stage.reduce_grads(1 / 8)          # once, after the last gradient has come
    stage.finish_grads()               # in the end: the shards have their gradients

Several microbatches are in flight at once, so no module can tell from its own calls who needs its parameters next, and
which of its gradients is the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from disttrain.errors import ShardingError
from disttrain.fsdp2.comm import Named
from disttrain.fsdp2.param import ShardedParam

if TYPE_CHECKING:
    from disttrain.fsdp2.state import ShardState


class GradSums:
    """Adds the gradients of each microbatch, when they come, to sums in the dtype of their reduction.

    A first gradient is read once and written once, in the wider dtype; each further one costs 10 bytes of traffic per
    element of bfloat16 summed in float32, where autograd's own sum in bfloat16 costs 6.
    """

    def __init__(self, params: Sequence[ShardedParam], dtype: torch.dtype) -> None:
        self._params = params
        self._dtype = dtype
        self._watched: dict[ShardedParam, tuple[nn.Parameter, RemovableHandle]] = {}

    def watch(self) -> None:
        """Ask to be told of each gradient of the whole parameters that there are now."""
        for param in self._params:
            whole = param.unsharded
            known = self._watched.get(param)
            if whole is not None and whole.requires_grad and (known is None or known[0] is not whole):
                handle = whole.register_post_accumulate_grad_hook(lambda _, param=param: param.keep_grad(self._dtype))
                self._watched[param] = (whole, handle)

    def stop(self) -> None:
        """Leave further gradients to autograd."""
        for _, handle in self._watched.values():
            handle.remove()
        self._watched.clear()


def start_schedule(states: Sequence[ShardState]) -> None:
    """From now on these modules, a root first, do nothing by themselves."""
    if states[0].context is None:
        states[0].become_root()
    for state in states:
        if state.scheduled is not None:
            continue
        state.reshard()
        state.is_kept_unsharded = state.is_shown_on_request = False
        state.forget_forward()
        state.scheduled = state.with_those_below()
        for group in state.groups:
            group.sum_grads_as_they_come()


def stop_schedule(states: Sequence[ShardState]) -> None:
    """From now on these modules gather, free and reduce around their forwards and backwards."""
    for state in states:
        if state.scheduled is None:
            continue
        state.reshard()
        state.is_kept_unsharded = state.is_shown_on_request = False
        state.scheduled = None
        for group in state.groups:
            if group.grad_sums is not None:
                group.grad_sums.stop()
                group.grad_sums = None


def unshard_all(states: Sequence[ShardState]) -> None:
    """Start all gathers, in the order of the modules."""
    context = states[0].context
    if context is not None and not context.structure.holds():
        context.root.become_root()
    current = states[0].context
    if current is not None:
        current.make_plan()
        current.expect_all()
    comm = states[0].comm
    comm.ready, states[0].post_optim_event = states[0].post_optim_event, None
    for state in states:
        state.unshard()
        if state.is_silent:
            state.wait_for_unshard()
    comm.ready = None


def reduce_all(states: Sequence[ShardState], scale: float) -> None:
    """Start all reductions, last module first, whichever gradients there are on this rank."""
    for state in reversed(states):
        if state.requires_gradient_sync:
            for group in reversed(state.groups):
                with Named(group):
                    group.reduce_all(scale)
    context = states[0].context
    if context is not None:
        context.reduce_rest()


def finish_all(states: Sequence[ShardState]) -> None:
    """Hand the reduced gradients out, those of other roots with the same streams, too."""
    comm = states[0].comm
    comm.finish_reductions()
    comm.finish_offload()
    comm.several_grads.call_hooks()
    comm.finish_upload()
    comm.release_gathered()


def check_whole(state: ShardState, operation: str) -> None:
    """Wait for the gather of the module's own parameters. Raises ShardingError where nobody has started it."""
    state.wait_for_unshard()
    sharded = next((group for group in state.groups if not group.is_unsharded), None)
    if sharded is not None:
        raise ShardingError(
            operation,
            f"{type(state.module).__name__}, which has parameter {sharded.params[0].fqn}, is sharded, and a schedule"
            " decides when it is not.",
            "Let the schedule unshard the stage before it computes, or call set_is_scheduled(False).",
            rank=sharded.sharding.mesh.get_rank(),
        )
