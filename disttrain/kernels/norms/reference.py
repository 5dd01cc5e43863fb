"""The norms by torch's operators, for CPUs, fp64 and whatever else the kernels don't take; they judge the kernels."""

from __future__ import annotations

import torch

from disttrain.kernels.choice import wide_dtype


def forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    is_centered: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The normed rows, the rows that were normed, and per row the scale, and before it the mean where it is taken away.

    Args:    x, residual  (rows, D), contiguous;  weight, bias  (D,).
    Returns: (rows, D) twice, as x; the statistics (rows, 1 or 2), wide.
    """
    total = x if residual is None else x + residual
    wide = total.to(wide_dtype(x.dtype))
    statistics = []
    if is_centered:
        mean = wide.mean(1, keepdim=True)
        statistics.append(mean)
        wide = wide - mean
    scale = (wide.square().mean(1, keepdim=True) + eps).rsqrt()
    statistics.append(scale)
    y = wide * scale
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(x.dtype), total, torch.cat(statistics, 1)


def backward(
    grad: torch.Tensor,
    grad_total: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    statistics: torch.Tensor,
    num_parameters: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the rows x that were normed, and those of weight and bias, (num_parameters, D), of `dtype`.

    Args: grad  of the normed rows;  grad_total  of x, by other ways.
    """
    is_centered, scale = statistics.shape[1] == 2, statistics[:, -1:]
    wide, wide_grad = x.to(statistics.dtype), grad.to(statistics.dtype)
    normed = (wide - statistics[:, :1] if is_centered else wide) * scale
    parameter_grads = [(wide_grad * normed).sum(0), wide_grad.sum(0)][:num_parameters]
    grad_parameters = torch.stack(parameter_grads) if parameter_grads else statistics.new_empty((0, x.shape[1]))
    if weight is not None:
        wide_grad = wide_grad * weight
    grad_x = wide_grad - normed * (normed * wide_grad).mean(1, keepdim=True)
    if is_centered:
        grad_x = grad_x - wide_grad.mean(1, keepdim=True)
    grad_x = grad_x * scale
    if grad_total is not None:
        grad_x = grad_x + grad_total
    return grad_x.to(x.dtype), grad_parameters.to(dtype)
