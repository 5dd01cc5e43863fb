"""Results of operators that sample, fold and rearrange images, by formulas, as in `known_results.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from disttrain.dtensor._torch import OpOverload
from disttrain.dtensor.dispatch.outputs.known_pointwise import Result

Results = Sequence[Result | None] | None


def _sampled(operand: torch.Tensor, grid: torch.Tensor, mode: int, padding: int, aligns: bool) -> Results:
    """An image at the places of a grid."""
    num_dims = operand.ndim - 2
    if operand.dtype is not grid.dtype or not operand.dtype.is_floating_point or grid.ndim != operand.ndim:
        return None
    if (
        grid.shape[0] != operand.shape[0]
        or grid.shape[-1] != num_dims
        or mode not in (0, 1)
        or padding not in (0, 1, 2)
    ):
        return None
    return [((*operand.shape[:2], *grid.shape[1:-1]), operand.dtype)]


def _sampled_backward(
    grad: torch.Tensor,
    operand: torch.Tensor,
    grid: torch.Tensor,
    mode: int,
    padding: int,
    aligns: bool,
    wanted: Sequence[bool],
) -> Results:
    forward = _sampled(operand, grid, mode, padding, aligns)
    if forward is None or forward[0] != (tuple(grad.shape), grad.dtype) or not all(wanted):
        return None
    return [(tuple(operand.shape), operand.dtype), (tuple(grid.shape), grid.dtype)]


def _num_windows(sizes: Sequence[int], *ways: Sequence[int]) -> int | None:
    """Of all windows in an image; the ways are kernel, dilation, padding and stride."""
    if any(len(way) != 2 for way in (sizes, *ways)) or min(*ways[0], *ways[1], *ways[3]) < 1 or min(ways[2]) < 0:
        return None
    counts = [
        (size + 2 * pad - spread * (kernel - 1) - 1) // step + 1
        for size, kernel, spread, pad, step in zip(sizes, *ways, strict=True)
    ]
    return math.prod(counts) if min(counts) > 0 else None


def _unfolded(
    operand: torch.Tensor, kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Results:
    num_windows = _num_windows(operand.shape[2:], kernel, dilation, padding, stride) if operand.ndim == 4 else None
    if num_windows is None:
        return None
    return [((operand.shape[0], operand.shape[1] * math.prod(kernel), num_windows), operand.dtype)]


def _folded(
    operand: torch.Tensor,
    size: Sequence[int],
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Results:
    num_windows = _num_windows(size, kernel, dilation, padding, stride)
    in_window = math.prod(kernel)
    if operand.ndim != 3 or num_windows != operand.shape[2] or operand.shape[1] % in_window:
        return None
    return [((operand.shape[0], operand.shape[1] // in_window, *size), operand.dtype)]


def _shuffled(operand: torch.Tensor, factor: int) -> Results:
    if operand.ndim < 3 or factor < 1 or operand.shape[-3] % factor**2:
        return None
    *batch, channels, height, width = operand.shape
    return [((*batch, channels // factor**2, height * factor, width * factor), operand.dtype)]


def _unshuffled(operand: torch.Tensor, factor: int) -> Results:
    if operand.ndim < 3 or factor < 1 or operand.shape[-2] % factor or operand.shape[-1] % factor:
        return None
    *batch, channels, height, width = operand.shape
    return [((*batch, channels * factor**2, height // factor, width // factor), operand.dtype)]


def _regrouped(operand: torch.Tensor, num_groups: int) -> Results:
    """Channels in another order."""
    if operand.ndim < 3 or num_groups < 1 or operand.shape[-3] % num_groups or operand.shape[1] % num_groups:
        return None
    return [(tuple(operand.shape), operand.dtype)] if 1 not in operand.shape else None


def _padded(operand: torch.Tensor, padding: Sequence[int], value: Any = 0) -> Results:
    """With constants; with fewer elements where a width is negative."""
    if len(padding) % 2 or len(padding) > 2 * operand.ndim or not all(type(width) is int for width in padding):
        return None
    shape = [*operand.shape]
    for at in range(len(padding) // 2):
        shape[-1 - at] += padding[2 * at] + padding[2 * at + 1]
    # What is narrowed keeps the strides of a dim of one.
    is_as_new = min(padding, default=0) >= 0 or 1 not in operand.shape
    is_known = is_as_new and min(shape, default=0) > 0 and type(value) in (int, float, bool)
    return [(tuple(shape), operand.dtype)] if is_known else None


def _unpooled(operand: torch.Tensor, indices: torch.Tensor, size: Sequence[int], *ways: Sequence[int]) -> Results:
    num_dims = len(size)
    if indices.dtype is not torch.int64 or indices.shape != operand.shape or operand.ndim != num_dims + 2:
        return None
    is_known = min(size) > 0 and all(
        len(way) == num_dims and min(way) >= at for at, way in zip((1, 0), ways, strict=False)
    )
    return [((*operand.shape[:2], *size), operand.dtype)] if is_known else None


def _repeated(operand: torch.Tensor, repeats: Sequence[int]) -> Results:
    num_new = len(repeats) - operand.ndim
    if num_new < 0 or min(repeats, default=0) < 1:
        return None
    sizes = (*[1] * num_new, *operand.shape)
    return [(tuple([size * times for size, times in zip(sizes, repeats, strict=True)]), operand.dtype)]


_ATEN: Final = torch.ops.aten
IMAGES: Final[dict[OpOverload, Callable[..., Results]]] = {
    **{getattr(_ATEN, f"grid_sampler_{dims}d").default: _sampled for dims in (2, 3)},
    **{getattr(_ATEN, f"grid_sampler_{dims}d_backward").default: _sampled_backward for dims in (2, 3)},
    _ATEN.im2col.default: _unfolded,
    _ATEN.col2im.default: _folded,
    _ATEN.pixel_shuffle.default: _shuffled,
    _ATEN.pixel_unshuffle.default: _unshuffled,
    _ATEN.channel_shuffle.default: _regrouped,
    _ATEN.constant_pad_nd.default: _padded,
    _ATEN.max_unpool2d.default: _unpooled,
    _ATEN.max_unpool3d.default: _unpooled,
    _ATEN.repeat.default: _repeated,
}
