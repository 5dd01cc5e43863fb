"""Gradients clipped by the norm of a whole pipeline's, as torch.nn.utils clips those of one process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from disttrain.arguments import arguments_of
from disttrain.dtensor import DTensor
from disttrain.errors import ScheduleError
from disttrain.pipelining.runtime.schedule_runtime import PipelineSchedule
from disttrain.process_group import ProcessGroup
from disttrain.process_group.current import resolve_group
from disttrain.process_group.norms import norm_over_ranks

_OPERATION = "pipelining.clip_grad_norm_"


def clip_grad_norm_(
    parameters: PipelineSchedule | Iterable[torch.Tensor] | torch.Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    group: ProcessGroup | None = None,
) -> torch.Tensor:
    """Scale the gradients of all stages so that their norm, as of one vector, is at most `max_norm`.

    Args:    parameters  the schedule, whose stages' parameters these are; it knows which weights are tied, and these
                         count once. Or this rank's parameters, of which no other rank has a copy;
             norm_type   above 0, `inf` for the largest element;
             group       the ranks of the pipeline; default: the schedule's, and of parameters all ranks. Ranks that
                         hold parts of the same DTensors are not ranks of one pipeline: each of them clips in its own.
    Returns: the norm before, a plain tensor of no dims, in fp32 or, where parameters are, in fp64.
    Raises:  ScheduleError, on all ranks alike, when the norm is not finite and `error_if_nonfinite` asks for that, when
             `norm_type` is none, or when a schedule has run no step.
    Collective: every rank of the pipeline, those without gradients too.
    """
    with arguments_of(_OPERATION, remedy="Give tensors, or the schedule, and numbers."):
        max_norm, norm_type = float(max_norm), float(norm_type)
        if not isinstance(parameters, PipelineSchedule | torch.Tensor):
            parameters = list(dict.fromkeys(parameters))
            if any(not isinstance(parameter, torch.Tensor) for parameter in parameters):
                raise TypeError("a parameter is no tensor")
    if not norm_type > 0:
        raise ScheduleError(_OPERATION, f"norm_type is {norm_type}.", "Give a number above 0, or inf.")
    if isinstance(parameters, PipelineSchedule):
        group = group or parameters.group
        device = parameters.device
        tensors: Sequence[torch.Tensor] = parameters.parameters()
        counted: Sequence[torch.Tensor] = parameters.parameters(without_copies=True)
    else:
        group = resolve_group(_OPERATION, group)
        device = group.world.device
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        counted = tensors
    # torch knows no largest element of nothing.
    grads = [tensor.grad for tensor in counted if tensor.grad is not None and tensor.grad.numel()]
    norm = get_total_norm(grads, norm_type, foreach=foreach)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    total = norm_over_ranks(norm.to(device, torch.float64), norm_type, group)
    if error_if_nonfinite and not total.isfinite():
        raise ScheduleError(
            _OPERATION,
            f"the norm of order {norm_type} of the pipeline's gradients is {total.item()}.",
            "Find the gradient that is not finite, or let error_if_nonfinite be False.",
            rank=group.world.rank,
        )
    is_double = any(parameter.dtype == torch.float64 for parameter in tensors)
    total = total.to(torch.float64 if is_double else torch.float32)
    clip_grads_with_norm_(tensors, max_norm, total, foreach=foreach)
    return total
