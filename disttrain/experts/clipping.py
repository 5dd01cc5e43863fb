"""Gradients clipped by the norm of a whole model's, of which each rank has other experts as modules of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from disttrain.dtensor import DTensor
from disttrain.errors import ShardingError
from disttrain.mesh import DeviceMesh
from disttrain.process_group.norms import norm_over_ranks

_OPERATION = "experts.clip_grad_norm_"


def clip_grad_norm_(
    module: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale the gradients of `module` so that their norm, as of one vector, is at most `max_norm`.

    As torch's of the same name, which sees of experts in a ModuleList this rank's alone: of those the norm is taken
    over the ranks that share them. All other parameters count as they do there.

    Args:    module     the whole model, which knows what other ranks have in the place of absent experts.
             norm_type  above 0, `inf` for the largest element.
    Returns: the norm before, a plain tensor of no dims.
    Raises:  ShardingError, on all ranks alike, when the norm is not finite and `error_if_nonfinite` asks for that.
    Collective: every rank of the model, those without experts or gradients too.
    """
    norm_type = float(norm_type)
    if not isinstance(module, nn.Module) or not norm_type > 0:
        problem = f"a {type(module).__name__} and norm_type {norm_type} are given."
        raise ShardingError(_OPERATION, problem, "Give the model, and a number above 0, or inf.")
    axes: dict[DeviceMesh, set[nn.Parameter]] = {}
    for part in module.modules():
        if (mesh := vars(part).get("divided_along")) is not None:
            axes.setdefault(mesh, set()).update(part.parameters())
    parameters = list(module.parameters())
    divided = {parameter for those in axes.values() for parameter in those}
    norms = [_norm((each for each in parameters if each not in divided), norm_type, foreach)]
    for mesh, those in axes.items():
        local_norm = _norm((each for each in parameters if each in those), norm_type, foreach)
        norms.append(norm_over_ranks(local_norm.to(mesh.device_type), norm_type, mesh.get_group()))
    device = norms[-1].device
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), norm_type)
    if error_if_nonfinite and not total.isfinite():
        problem = f"the norm of order {norm_type} of the gradients is {total.item()}."
        raise ShardingError(_OPERATION, problem, "Find the gradient that is not finite, or let error_if_nonfinite be.")
    is_double = any(parameter.dtype == torch.float64 for parameter in parameters)
    total = total.to(torch.float64 if is_double else torch.float32)
    clip_grads_with_norm_(parameters, max_norm, total, foreach=foreach)
    return total


def _norm(parameters: Iterable[nn.Parameter], norm_type: float, foreach: bool | None) -> torch.Tensor:
    # torch knows no largest element of nothing.
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None and parameter.grad.numel()]
    norm: torch.Tensor = get_total_norm(grads, norm_type, foreach=foreach)
    whole: torch.Tensor = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return whole.double()
