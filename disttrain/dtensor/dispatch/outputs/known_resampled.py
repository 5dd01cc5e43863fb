"""Results of operators that give images other sizes, by formulas, as in `known_results.py`: interpolation, pooling to a
size, padding by what is inside. Also of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from disttrain.dtensor._torch import OpOverload
from disttrain.dtensor.dispatch.outputs.known_pointwise import Result
from disttrain.dtensor.dispatch.outputs.known_shapes import Shape

Results = Sequence[Result] | None


def _sized(operand: torch.Tensor, size: Sequence[int], *settings: Any) -> Results:
    """Interpolated, or pooled, to `size`."""
    if operand.ndim != len(size) + 2 or not operand.dtype.is_floating_point:
        return None
    is_known = all(type(length) is int and length > 0 for length in size)
    return [((*operand.shape[:2], *size), operand.dtype)] if is_known else None


def _interpolated_backward(grad: torch.Tensor, size: Sequence[int], before: Sequence[int], *settings: Any) -> Results:
    is_alike = len(before) == len(size) + 2 and tuple(grad.shape) == (*before[:2], *size)
    return [(tuple(before), grad.dtype)] if is_alike and grad.dtype.is_floating_point else None


def _largest(operand: torch.Tensor, size: Sequence[int]) -> Results:
    pooled = _sized(operand, size)
    return pooled and [*pooled, (pooled[0][0], torch.int64)]


def _pooled_backward(grad: torch.Tensor, operand: torch.Tensor, *indices: torch.Tensor) -> Results:
    is_alike = grad.ndim == operand.ndim and grad.shape[:2] == operand.shape[:2] and grad.dtype is operand.dtype
    if not is_alike or any(each.shape != grad.shape for each in indices) or not grad.dtype.is_floating_point:
        return None
    return [(tuple(operand.shape), operand.dtype)]


def _padded_shape(operand: torch.Tensor, padding: Sequence[int]) -> Shape | None:
    """The shape with the last dims widened by pairs of sizes, those of the last dim first."""
    num_dims = len(padding) // 2
    if operand.ndim != num_dims + 2 or not all(type(width) is int for width in padding):
        return None
    shape = [*operand.shape]
    for at in range(num_dims):
        before, after = padding[2 * at : 2 * at + 2]
        # What reflects cannot be wider than what it reflects.
        if not 0 <= before < shape[-1 - at] or not 0 <= after < shape[-1 - at]:
            return None
        shape[-1 - at] += before + after
    return tuple(shape)


def _padded(operand: torch.Tensor, padding: Sequence[int]) -> Results:
    shape = _padded_shape(operand, padding)
    return [(shape, operand.dtype)] if shape and operand.dtype.is_floating_point else None


def _padded_backward(grad: torch.Tensor, operand: torch.Tensor, padding: Sequence[int]) -> Results:
    is_alike = grad.dtype is operand.dtype and tuple(grad.shape) == _padded_shape(operand, padding)
    return [(tuple(operand.shape), operand.dtype)] if is_alike and grad.dtype.is_floating_point else None


_ATEN: Final = torch.ops.aten
_INTERPOLATIONS: Final = (
    *(f"{kind}{dims}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for dims in (1, 2, 3)),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)
_PADDINGS: Final = tuple(f"{kind}_pad{dims}d" for kind in ("reflection", "replication") for dims in (1, 2, 3))


def _all(names: Sequence[str], formula: Callable[..., Results]) -> dict[OpOverload, Callable[..., Results]]:
    return {getattr(_ATEN, name).default: formula for name in names}


RESAMPLED_BACKWARD: Final[dict[OpOverload, Callable[..., Results]]] = {
    **_all([f"{name}_backward" for name in _INTERPOLATIONS], _interpolated_backward),
    **_all([f"{name}_backward" for name in _PADDINGS], _padded_backward),
    **_all([f"_adaptive_avg_pool{dims}d_backward" for dims in (2, 3)], _pooled_backward),
    **_all([f"adaptive_max_pool{dims}d_backward" for dims in (2, 3)], _pooled_backward),
}
RESAMPLED: Final[dict[OpOverload, Callable[..., Results]]] = {
    **_all(_INTERPOLATIONS, _sized),
    **_all(_PADDINGS, _padded),
    **_all(["_adaptive_avg_pool2d", "_adaptive_avg_pool3d"], _sized),
    **_all(["adaptive_max_pool2d", "adaptive_max_pool3d"], _largest),
    **RESAMPLED_BACKWARD,
}
