"""Rotary positions: pairs of elements rotated by their position's angle, as one operator, also in place.

A rotation's gradient is the rotation back, so only the angles' cosines and sines are kept.

Source: Su et al., "RoFormer" (arXiv 2104.09864).
"""

from __future__ import annotations

from typing import Any, Final

import torch

from disttrain.dtensor import Placement, Replicate, Shard, register_sharding
from disttrain.errors import ShapeError
from disttrain.kernels._torch import is_transformed
from disttrain.kernels.choice import choose
from disttrain.kernels.operators import batch, call, define, differentiate
from disttrain.kernels.rotary import reference as rotary_reference


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, is_interleaved: bool = False) -> torch.Tensor:
    """Rotates each pair (a, b) of x's last dim to (a cos - b sin, a sin + b cos).

    Args:    x         (batch, heads, S, E), of any strides: (batch, S, heads, E).transpose(1, 2) is read in place;
             cos, sin  (S, E / 2), fp32, of each position; without a gradient.
             is_interleaved  pairs are (2i, 2i + 1), else (i, i + E / 2).
    Returns: as x, with its strides, computed in fp32 (fp64 of fp64).
    Raises:  ShapeError for tensors that don't fit.
    Gradient: of x, any number of times.
    """
    _check("rotate", x, cos, sin)
    return call(ROTATE, x, cos, sin, is_interleaved, False)  # type: ignore[no-any-return]


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, is_interleaved: bool = False) -> torch.Tensor:
    """Rotates as `rotate` in x's own memory, which is returned; what x was made of must not need its values for
    backward."""
    _check("rotate_", x, cos, sin)
    if any(size > 1 and not stride for size, stride in zip(x.shape, x.stride(), strict=True)):
        problem = f"x is expanded: its shape is {tuple(x.shape)}, its strides are {x.stride()}."
        raise ShapeError("rotate_", problem, "Use rotate, or x.contiguous().")
    needs_grad = torch.is_grad_enabled() and x.requires_grad
    if needs_grad and x.is_leaf:
        raise ShapeError("rotate_", "x is a leaf that requires a gradient.", "Use rotate.")
    if (needs_grad and torch.compiler.is_compiling()) or (not torch.compiler.is_compiling() and is_transformed()):
        # A graph plans memory by itself; transforms know no formula of what writes to its arguments.
        return x.copy_(rotate(x, cos, sin, is_interleaved=is_interleaved))
    if needs_grad:
        return _InPlace.apply(x, cos, sin, is_interleaved)  # type: ignore[no-any-return, no-untyped-call]
    torch.ops.disttrain.rotate_(x, cos, sin, is_interleaved, False)
    return x


def _check(operation: str, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    if x.dim() != 4 or x.shape[-1] % 2 or not x.is_floating_point():
        problem = f"x is {x.dtype} of shape {tuple(x.shape)}."
        raise ShapeError(operation, problem, "Give floats (batch, heads, positions, elements), elements even.")
    wanted = (x.shape[2], x.shape[3] // 2)
    if tuple(cos.shape) != wanted or tuple(sin.shape) != wanted:
        problem = f"cos has shape {tuple(cos.shape)}, sin {tuple(sin.shape)}; x has {tuple(x.shape)}."
        raise ShapeError(operation, problem, f"Give {wanted}, an angle for each position and pair.")


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool) -> torch.Tensor:
        torch.ops.disttrain.rotate_(x, cos, sin, is_interleaved, False)
        ctx.mark_dirty(x)
        ctx.save_for_backward(cos, sin)
        ctx.is_interleaved = is_interleaved
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return torch.ops.disttrain.rotate(grad, *ctx.saved_tensors, ctx.is_interleaved, True), None, None, None


def _load() -> Any:
    # Triton is not on every machine, and slow to load.
    from disttrain.kernels.rotary import triton_kernels as rotary_triton

    return rotary_triton


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool, is_back: bool) -> torch.Tensor:
    result = torch.empty_like(x)
    _turn(x, cos, sin, result, is_interleaved, is_back)
    return result


def _rotate_in_place(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool, is_back: bool
) -> None:
    _turn(x, cos, sin, x, is_interleaved, is_back)


def _turn(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, result: torch.Tensor, is_interleaved: bool, is_back: bool
) -> None:
    kernels = choose("rotate", x, "", rotary_reference, _load, is_fused_when_traced=True)
    kernels.turn(x, cos.contiguous(), sin.contiguous(), result, is_interleaved, is_back)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, cos, sin, ctx.is_interleaved, ctx.is_back = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, grad: torch.Tensor) -> Any:
    result = call(ROTATE, grad, *ctx.saved_tensors, ctx.is_interleaved, not ctx.is_back)
    return result, None, None, None, None


_ANGLES = "Tensor cos, Tensor sin, bool is_interleaved, bool is_back"
ROTATE: Final = define(
    f"rotate(Tensor x, {_ANGLES}) -> Tensor", _rotate, lambda x, *_: torch.empty_like(x), is_traceable=True
)
define(f"rotate_(Tensor(a!) x, {_ANGLES}) -> ()", _rotate_in_place, lambda *_: None)
differentiate(ROTATE, _keep, _backward, is_repeatable=True)
batch(ROTATE, 0)  # which takes four dims, and no more

Choices = list[tuple[list[Placement | None], list[Placement | None]]]


@register_sharding(ROTATE)
def _shard_rotate(x: Any, cos: Any, sin: Any, is_interleaved: bool, is_back: bool) -> Choices:
    return [([Shard(dim)], [Shard(dim), Replicate(), Replicate(), None, None]) for dim in (0, 1)]
