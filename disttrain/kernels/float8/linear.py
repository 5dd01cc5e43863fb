"""A linear layer whose three products are of float8: forward, the gradient of the input, and that of the weight.

Each call computes new scales. Forward multiplies e4m3 by e4m3; gradients are e5m2, or with scales for rows e4m3. For
backward only the input's transpose in float8 is kept.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any, Final, Literal
from weakref import ref

import torch
import torch.nn.functional as F
from torch import nn

from disttrain.autocast import is_within_autocast
from disttrain.dtensor import DTensor
from disttrain.errors import ShapeError
from disttrain.kernels.float8.latest import LATEST
from disttrain.kernels.float8.operator import Cast, cast, multiply
from disttrain.kernels.float8.reference import LINE
from disttrain.kernels.float8.weight import WEIGHT_DTYPE, Float8Gather, Float8Weight
from disttrain.kernels.linear_backward import note_parameters, parameter_grads, refuse_create_graph
from disttrain.kernels.operators import refuse_transforms
from disttrain.weight_grads import Grads

Recipe = Literal["tensorwise", "rowwise"]
"""One scale for a matrix, or one for each row of each product's operands: slower, and of more precision."""

GRAD_DTYPE: Final = {"tensorwise": torch.float8_e5m2, "rowwise": torch.float8_e4m3fn}


def float8_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, recipe: Recipe = "tensorwise"
) -> torch.Tensor:
    """F.linear(x, weight, bias), multiplied in float8, summed in fp32.

    Args:    x  (..., K);  weight  (N, K), plain or a Float8Weight;  bias  (N,). K and N are multiples of 16.
    Returns: (..., N), as x; within autocast, of its dtype.
    Raises:  ShapeError for other sizes or recipes.
    Gradient: of all three, once.
    """
    check_fits(x, weight, recipe)
    refuse_transforms("float8_linear")
    # By which its cast is known again; autograd does not see it.
    original = None if torch.compiler.is_compiling() else ref(x)
    if is_within_autocast(x.device):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if not torch.is_grad_enabled():
        # Within a function of autograd nobody sees this, and transposes would be made for a backward.
        x, weight = x.detach(), weight.detach()
    parts: tuple[Any, ...] = (None, None, 1)
    if isinstance(weight, Float8Weight):
        parts = (weight.codes, weight.scales, weight.rows_per_scale)
    rows = x.unsqueeze(0) if x.ndim == 1 else x.flatten(0, -2)
    result: torch.Tensor = _Float8Linear.apply(rows, weight, bias, recipe, *parts, original)  # type: ignore[no-untyped-call]
    return result.view(*x.shape[:-1], len(weight))


def float8_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, recipe: Recipe) -> torch.Tensor:
    """`float8_linear`; where a layer has been cut into parts that it does not take, F.linear, with one warning."""
    if weight.shape[0] % LINE or weight.shape[1] % LINE:
        _warn(tuple(weight.shape))
        return F.linear(x, weight, bias)
    return float8_linear(x, weight, bias, recipe)


@cache
def _warn(shape: tuple[int, ...]) -> None:
    """Warns once for each shape."""
    problem = f"a part of a weight has shape {shape}, and sizes must be multiples of {LINE}"
    warnings.warn(f"float8_linear: {problem}. It is multiplied in its own dtype.", stacklevel=3)


def check_fits(x: torch.Tensor, weight: torch.Tensor, recipe: str) -> None:
    """Raise ShapeError for what `float8_linear` does not take."""
    if recipe not in GRAD_DTYPE:
        raise ShapeError("float8_linear", f"the recipe is {recipe!r}.", "Give one of tensorwise, rowwise.")
    if weight.ndim != 2 or x.shape[-1:] != weight.shape[1:] or not x.is_floating_point():
        problem = f"x is {x.dtype} of shape {tuple(x.shape)}, the weight has {tuple(weight.shape)}."
        raise ShapeError("float8_linear", problem, "Give floats (..., K) and a weight (N, K).")
    if weight.shape[0] % LINE or weight.shape[1] % LINE:
        problem = f"the weight has shape {tuple(weight.shape)}."
        raise ShapeError("float8_linear", problem, f"Give multiples of {LINE}, or leave it to F.linear.")


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        recipe: str,
        codes: torch.Tensor | None,
        scales: torch.Tensor | None,
        rows_per_scale: int,
        original: ref[torch.Tensor] | None,
    ) -> torch.Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        by_rows = recipe == "rowwise"
        key = None if original is None else LATEST.key_of(original(), x.dtype, by_rows, wants_columns=needs_weight)
        rows = None if key is None else LATEST.get(key)
        if rows is None:
            rows = cast(x, WEIGHT_DTYPE, by_rows=by_rows, wants_columns=needs_weight)
            if key is not None:
                LATEST.put(key, rows)
        factor = _factor(weight, codes, scales, rows_per_scale, by_rows, needs_x)
        result = multiply(rows.rows, rows.row_scales, factor.rows, factor.row_scales, x.dtype, is_fast=True)
        if bias is not None:
            result = result + bias.to(result.dtype)
        weight_factor = (factor.columns, factor.column_scales) if codes is None else (codes, scales)
        ctx.save_for_backward(rows.columns, rows.column_scales, *weight_factor)
        ctx.recipe, ctx.rows_per_scale = recipe, rows_per_scale
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        ctx.was_gathered = codes is not None
        note_parameters(ctx, weight, bias)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        refuse_create_graph("float8_linear", "F.linear there")
        if not torch.compiler.is_compiling():
            LATEST.clear()
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        columns, column_scales, factor, factor_scales = ctx.saved_tensors
        by_rows = ctx.recipe == "rowwise"
        rows = cast(grad, GRAD_DTYPE[ctx.recipe], by_rows=by_rows, wants_rows=needs_x, wants_columns=needs_weight)
        x_grad = None
        if needs_x:
            if ctx.was_gathered:
                turned = _turned(factor, factor_scales, ctx.rows_per_scale, by_rows)
                factor, factor_scales = turned.columns, turned.column_scales
            x_grad = multiply(rows.rows, rows.row_scales, factor, factor_scales, grad.dtype)

        # A keeper holds what this names until it computes, and no more.
        grad_columns, grad_scales = rows.columns, rows.column_scales
        weight_dtype, bias_dtype = ctx.dtypes
        grad_rows = grad if needs_bias else None

        def compute() -> Grads:
            weight_grad = None
            if needs_weight:
                weight_grad = multiply(grad_columns, grad_scales, columns, column_scales, weight_dtype)
            return weight_grad, None if grad_rows is None else grad_rows.sum(0).to(bias_dtype)

        return x_grad, *parameter_grads(ctx, compute), None, None, None, None, None


def _factor(
    weight: torch.Tensor,
    codes: torch.Tensor | None,
    scales: torch.Tensor | None,
    rows_per_scale: int,
    by_rows: bool,
    wants_columns: bool,
) -> Cast:
    """The weight as forward multiplies by it; one that was gathered is not transposed before backward."""
    if codes is None or scales is None:
        return cast(weight, WEIGHT_DTYPE, by_rows=by_rows, wants_columns=wants_columns)
    if by_rows:
        return Cast(codes, scales[: len(codes)], codes, scales)
    if scales.numel() == 1:
        # One scale already, and bringing the codes to it would leave them as they are.
        return Cast(codes, scales, codes, scales)
    return cast(
        codes, WEIGHT_DTYPE, by_rows=False, wants_columns=False, in_scales=scales, rows_per_scale=rows_per_scale
    )


def _turned(codes: torch.Tensor, scales: torch.Tensor, rows_per_scale: int, by_rows: bool) -> Cast:
    return cast(codes, WEIGHT_DTYPE, by_rows=by_rows, wants_rows=False, in_scales=scales, rows_per_scale=rows_per_scale)


class Float8Linear(nn.Linear):
    """nn.Linear with products in float8, once `use_float8` has changed its class; its weight stays what it was."""

    recipe: Recipe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, DTensor) or isinstance(self.weight, DTensor):
            return super().forward(x)
        return float8_linear(x, self.weight, self.bias, self.recipe)

    def fsdp_gather_hooks(self, name: str) -> Float8Gather | None:
        """Tells `fully_shard` how to gather the parameter `name`: None as any other's."""
        return Float8Gather(self.recipe == "rowwise") if name == "weight" else None
