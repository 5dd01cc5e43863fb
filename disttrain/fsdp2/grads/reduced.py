"""Reduced gradients reach the shards. Hooks of a sharded parameter are called here, as autograd calls those of a leaf:

    parameter.register_hook                         with this rank's part of the reduced gradient, which it may replace
    parameter.register_post_accumulate_grad_hook    once that has been added to `parameter.grad`

So an optimizer may step within the backward, parameter by parameter, and clear the gradient. Autograd itself computes
gradients of what was gathered, and knows nothing of shards. Hooks run in the order in which reductions end, once for
each, on the stream that computes, ordered after the reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from disttrain.dtensor import DTensor, Spec
from disttrain.dtensor.gradients.settled import settle_gradient
from disttrain.dtensor.local_part import local_part
from disttrain.errors import ShardingError
from disttrain.fsdp2._torch import (
    gradient_hooks,
    have_hooks,
    post_accumulate_hooks,
    several_gradients,
    without_overrides,
)
from disttrain.fsdp2.grads.several import SeveralGrads
from disttrain.fsdp2.params.flat import FlatSlot
from disttrain.fsdp2.params.param import ShardedParam
from disttrain.fsdp2.transfers.comm import Comm

Receivers = Sequence[ShardedParam | None]


def parts_of(flat: torch.Tensor, receivers: Receivers, slots: Sequence[FlatSlot]) -> list[torch.Tensor]:
    """Views of a flat buffer, each receiver's part of it."""
    start = flat.storage_offset()
    return [
        flat if param is None else flat.as_strided(*param.part_form, start + slot.offset)
        for param, slot in zip(receivers, slots, strict=True)
    ]


def hand_out(parts: Sequence[torch.Tensor], receivers: Receivers, several: SeveralGrads) -> None:
    """Add its part to each receiver's gradient, and call its hooks. What has no receiver is dropped.

    Those that follow the addition are called when all have their gradients, last parameter first, as backward goes: one
    of them may step an optimizer that has others of these parameters.
    """
    shards = [param.sharded for param in receivers if param is not None]
    is_hooked = have_hooks(shards, settle_gradient)
    with nullcontext() if is_hooked else without_overrides():
        for param, part in zip(receivers, parts, strict=True):
            if param is None:
                continue
            sharded, local = param.sharded, part
            if is_hooked and (hooks := gradient_hooks(sharded)):
                local = _hooked(param, local, hooks, several)
            grad = sharded.grad
            if grad is None:
                sharded.grad = DTensor.__new__(DTensor, local, param.spec)
            elif getattr(grad, "_spec", None) is param.spec:
                local_part(grad).add_(local)
            else:
                _add(param, grad, local)
    if is_hooked:
        for shard in reversed(shards):
            for hook in post_accumulate_hooks(shard):
                hook(shard)


def to_host(flat: torch.Tensor, receivers: Receivers, comm: Comm, *, is_pinned: bool) -> torch.Tensor:
    """A copy on the host; it waits for the copy if something on the host reads it at once."""
    on_host = torch.empty(flat.numel(), dtype=flat.dtype, pin_memory=is_pinned)
    on_host.copy_(flat, non_blocking=True)
    comm.offloaded = comm.streams.mark()
    shards = [param.sharded for param in receivers if param is not None]
    is_hooked = have_hooks(shards, settle_gradient)
    if is_hooked or any(shard.grad is not None for shard in shards):
        comm.finish_offload()
    if is_hooked:
        # A step in a hook writes to shards, which gathers may still be reading.
        comm.finish_upload()
    return on_host


def _add(param: ShardedParam, grad: torch.Tensor, local: torch.Tensor) -> None:
    """Adds to a gradient that a user has set, which may have another layout. Collective in that case."""
    spec: Spec = param.spec
    actual: Spec | None = getattr(grad, "_spec", None)
    if actual is None or actual.shape != spec.shape or actual.mesh != spec.mesh:
        lies = "a plain tensor" if actual is None else f"a DTensor of shape {tuple(actual.shape)}, {actual.layout}"
        raise ShardingError(
            "backward",
            f"the gradient of parameter {param.fqn}, which is to be added to, is {lies}.",
            f"Set it to a DTensor of shape {tuple(spec.shape)} that lies as {spec.layout}, or to None.",
            rank=spec.mesh.get_rank(),
        )
    if actual.layout == spec.layout:
        local_part(grad).add_(local)
    else:
        grad.add_(DTensor(local, spec))


def _hooked(
    param: ShardedParam, local: torch.Tensor, hooks: Iterable[Callable[..., Any]], several: SeveralGrads
) -> torch.Tensor:
    spec: Spec = param.spec
    grad: Any = DTensor(local, spec)
    for hook in hooks:
        of_several = several_gradients(hook)
        if of_several is not None:
            several.add(of_several, grad)
            continue
        result = hook(grad)
        if result is None:
            continue
        if not isinstance(result, DTensor) or (result.shape, result.dtype) != (grad.shape, grad.dtype):
            raise ShardingError(
                "register_hook",
                f"a hook of parameter {param.fqn} gave a {type(result).__name__} of shape {tuple(result.shape)} and"
                f" {result.dtype} for a gradient of shape {tuple(grad.shape)} and {grad.dtype}.",
                "Return a DTensor like the one that the hook is given, or None.",
                rank=spec.mesh.get_rank(),
            )
        if result._spec.layout != spec.layout:
            result = result.redistribute(spec.mesh, spec.placements)
        grad = result
    part: torch.Tensor = grad._local_tensor
    return part
