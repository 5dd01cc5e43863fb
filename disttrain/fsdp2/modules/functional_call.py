"""Handles values that `torch.func.functional_call` puts in place of shards for one call.

A DTensor is gathered by itself, by operators that autograd knows: its gradient is averaged over the ranks, as that of a
shard is, and reaches whatever the value was made of. A plain tensor is the whole, and this rank's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from disttrain.dtensor import DTensor, Partial, Replicate
from disttrain.errors import ShardingError
from disttrain.fsdp2._torch import backward_is_running
from disttrain.fsdp2.modules.parameter_swap import ForeignTensor
from disttrain.fsdp2.params.extensions import ExtensionGroup
from disttrain.fsdp2.params.param import ShardedParam, is_given
from disttrain.fsdp2.params.param_group import ParamGroup


def take_up(group: ParamGroup, others: Sequence[ForeignTensor]) -> bool:
    """Let modules compute with what they were given since the shards were last there. Collective. False where that is
    other parameters, which came while the gathered ones were there, and are the module's from now on.

    Raises ShardingError for what they cannot compute with.
    """
    is_backward = backward_is_running()
    if not is_given([foreign.tensor for foreign in others]):
        # The forward that belongs to this backward has used the gathered parameters.
        return is_backward
    values: dict[torch.Tensor, torch.Tensor] = {}
    for foreign in others:
        if foreign.tensor is None:
            foreign.param.refuse_removed()
        if foreign.tensor not in values:
            # A checkpoint recomputes with values made during its backward, where hooks record no gradients by default.
            with torch.set_grad_enabled(is_backward or torch.is_grad_enabled()):
                values[foreign.tensor] = _whole(group, foreign.param, foreign.tensor)
        group.shown.substitute(foreign, values[foreign.tensor])
    return True


def _whole(group: ParamGroup, param: ShardedParam, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(group, ExtensionGroup) or param.unsharded_spec is not None:
        _refuse(param, "it is gathered in a way of its own", "Leave it out of the values")
    if not isinstance(tensor, DTensor):
        if tuple(tensor.shape) != param.shape:
            _refuse(param, f"it has shape {tuple(tensor.shape)}", f"Give a whole of shape {param.shape}, or a DTensor")
        return tensor.to(group.device, group.compute_dtype)
    if tensor.shape != param.spec.shape or tensor.device_mesh != param.spec.mesh:
        lies = f"a DTensor of shape {tuple(param.spec.shape)} on {param.spec.mesh.layout}"
        _refuse(param, f"it has shape {tuple(tensor.shape)} on {tensor.device_mesh.layout}", f"Give {lies}")
    num_axes = param.spec.mesh.ndim
    whole = tensor.redistribute(placements=[Replicate()] * num_axes)
    local: torch.Tensor = whole.to_local(grad_placements=[Partial("avg")] * num_axes)
    local = local.to(group.device, group.compute_dtype)
    if group.divide_factor is not None and local.requires_grad:
        scale = group.sharding.num_data_ranks / group.divide_factor
        local.register_hook(lambda grad: grad * scale)
    return local


def _refuse(param: ShardedParam, problem: str, remedy: str) -> NoReturn:
    raise ShardingError(
        "functional_call",
        f"the value given for parameter {param.fqn} cannot be computed with: {problem}.",
        f"{remedy}.",
        rank=param.spec.mesh.get_rank(),
    )
