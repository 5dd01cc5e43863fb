"""Gradients that are zero, or are made of zeros, where torch makes them of plain tensors.

The gradient of an average's gradient, say, does not depend on what was averaged, and torch gives that one plain zeros,
of the global shape. These operators are caught before autograd sees them, and give DTensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from disttrain.dtensor._torch import OpOverload, above_autograd, composed, is_traced, is_transformed
from disttrain.dtensor.mixed import is_plain
from disttrain.dtensor.placement import Replicate
from disttrain.dtensor.shard_sizes import contiguous_strides

_aten = torch.ops.aten


class _FlatIn(torch.autograd.Function):
    """The result, of which the gradient for `others` is zero."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(other)
        return result.clone()  # a view could not be written to

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, torch.Tensor]:
        (other,) = ctx.saved_tensors
        return grads[0], torch.zeros_like(other)


def _may_differentiate() -> bool:
    """False where nothing is kept for a gradient, and where functions or graphs are made of what is differentiated."""
    return torch.is_grad_enabled() and not is_transformed() and not is_traced()


def _flat_in(place: int) -> Callable[..., Any]:
    """For operators whose derivative by the argument at `place` is zero wherever there is one."""

    def run(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        other = args[place]
        if is_plain(other) or other.is_complex() or not (other.requires_grad and _may_differentiate()):
            return above_autograd(op, *args, **kwargs)
        # By its place: the same tensor may stand at another one as well.
        result = above_autograd(op, *args[:place], other.detach(), *args[place + 1 :], **kwargs)
        return _FlatIn.apply(result, other)  # type: ignore[no-untyped-call]

    return run


def _trace(op: OpOverload, matrix: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = (
        above_autograd(op, matrix) if is_plain(matrix) or matrix.ndim != 2 else matrix.diagonal().sum()
    )
    return result


def _det(op: OpOverload, matrix: torch.Tensor) -> torch.Tensor:
    """Of wrapped tensors torch takes the gradient by another formula, which has no right gradient of its own."""
    if is_plain(matrix) or matrix.ndim < 2 or not _may_differentiate():
        plain: torch.Tensor = composed(op, matrix)
        return plain
    tensor: Any = matrix
    placements = [
        placement if placement.is_shard() and placement.cut_dim < matrix.ndim - 2 else Replicate()
        for placement in tensor.placements
    ]
    part: torch.Tensor = op(tensor.redistribute(placements=placements).to_local())
    shape = tuple(matrix.shape[:-2])
    result: torch.Tensor = type(tensor).from_local(
        part, tensor.device_mesh, placements, shape=shape, stride=contiguous_strides(shape)
    )
    return result


ZERO_GRADS: Final[dict[OpOverload, Callable[..., Any]]] = {
    _aten.copysign.Tensor: _flat_in(1),
    _aten.linalg_det.default: _det,
    _aten.nextafter.default: _flat_in(1),
    _aten.sgn.default: _flat_in(0),
    _aten.trace.default: _trace,
    **dict.fromkeys(
        (
            _aten._adaptive_avg_pool2d_backward.default,
            _aten._adaptive_avg_pool3d_backward.default,
            _aten.adaptive_max_pool2d_backward.default,
            _aten.adaptive_max_pool3d_backward.default,
            _aten.avg_pool2d_backward.default,
            _aten.avg_pool3d_backward.default,
            _aten.fractional_max_pool2d_backward.default,
            _aten.fractional_max_pool3d_backward.default,
            _aten.max_pool2d_with_indices_backward.default,
            _aten.max_pool3d_with_indices_backward.default,
            _aten.reflection_pad1d_backward.default,
            _aten.reflection_pad2d_backward.default,
            _aten.reflection_pad3d_backward.default,
            _aten.replication_pad1d_backward.default,
            _aten.replication_pad2d_backward.default,
            _aten.replication_pad3d_backward.default,
        ),
        _flat_in(1),
    ),
}
