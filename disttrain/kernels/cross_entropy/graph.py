"""The loss of a linear layer as operators of a graph, and their gradient.

For a sum, the forward also computes the gradients, and backward only multiplies them. For losses row by row, backward
computes the logits again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from disttrain.dtensor._torch import as_one_call
from disttrain.dtensor.redistribute.transfers import all_reduce
from disttrain.kernels.choice import wide_dtype
from disttrain.kernels.copies.operator import copy_all
from disttrain.kernels.cross_entropy.linear_loss import Goal, Layer, Sums, Wanted, add_gradients, losses_of
from disttrain.kernels.cross_entropy.pieces import LossTerms
from disttrain.kernels.cross_entropy.plan import Blocks, plan_blocks
from disttrain.kernels.operators import define, refuse_transforms
from disttrain.pieces import piece_size
from disttrain.process_group.current import current_world
from disttrain.process_group.functional.order import run

NAME: Final = "linear_cross_entropy"


@as_one_call
def computed_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    terms: Sequence[float],
    group_name: str,
    block_bytes: int,
    sums_hidden: bool,
    is_summed: bool,
) -> torch.Tensor:
    """The sum of all rows' losses, or the loss of each row, (rows,); wide. Collective, and where hidden has a gradient
    again in backward.

    Args: hidden  (rows, D);  weight  (own classes, D);  bias  (own classes,);  target  (rows,), int64;
          class_weight  (classes,), wide;  terms  the values of a LossTerms;  block_bytes  see `plan_blocks`;
          group_name  of the group that cuts the classes, or empty;
          sums_hidden  hidden's gradient is the sum of all ranks', else this rank's term.
    """
    refuse_transforms(NAME)
    function = _Summed if is_summed else _Rows
    arguments = (hidden, weight, bias, target, class_weight, list(terms), group_name, block_bytes)
    return function.apply(sums_hidden, _wanted(hidden, weight, bias), *arguments)  # type: ignore[no-any-return, no-untyped-call]


def _wanted(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> list[bool]:
    is_enabled = torch.is_grad_enabled()
    return [is_enabled and tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)]


class _Summed(torch.autograd.Function):
    """Takes `sums_hidden`, the gradients that are wanted, and the operator's arguments from hidden to block_bytes."""

    @staticmethod
    def forward(ctx: Any, sums_hidden: bool, wanted: list[bool], *arguments: Any) -> torch.Tensor:
        total, *grads = run(torch.ops.disttrain.linear_loss_sum, *arguments, wanted)
        ctx.save_for_backward(*grads)
        ctx.wanted, ctx.summed_by = wanted, arguments[6] if sums_hidden else ""
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in arguments[:3]]
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _refuse_second_derivative()
        # Saved gradients stay as they are: there may be a second backward.
        grads = [
            _scaled(saved, grad, dtype) if is_wanted else None
            for saved, dtype, is_wanted in zip(ctx.saved_tensors, ctx.dtypes, ctx.wanted, strict=True)
        ]
        return _finished(grads, ctx.summed_by)


class _Rows(torch.autograd.Function):
    """The same for losses row by row."""

    @staticmethod
    def forward(ctx: Any, sums_hidden: bool, wanted: list[bool], *arguments: Any) -> torch.Tensor:
        losses, log_sums = run(torch.ops.disttrain.linear_loss_rows, *arguments)
        ctx.save_for_backward(*arguments[:5], log_sums)
        ctx.terms, ctx.wanted = arguments[5:], wanted
        ctx.summed_by = arguments[6] if sums_hidden else ""
        return losses

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _refuse_second_derivative()
        results = torch.ops.disttrain.linear_loss_backward(grad, *ctx.saved_tensors, *ctx.terms, ctx.wanted)
        grads = [
            result.to(tensor.dtype) if is_wanted else None
            for result, tensor, is_wanted in zip(results, ctx.saved_tensors[:3], ctx.wanted, strict=True)
        ]
        return _finished(grads, ctx.summed_by)


def _finished(grads: list[torch.Tensor | None], group_name: str) -> Any:
    """Sums hidden's gradient, of which each rank has its classes' term."""
    if grads[0] is not None and group_name:
        grads[0] = all_reduce(grads[0], "sum", current_world(NAME).find_group(NAME, group_name))
    return None, None, *grads, *[None] * 5


def _scaled(saved: torch.Tensor, grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    result = torch.empty_like(saved, dtype=dtype)
    copy_all([result], [saved], grad)
    return result


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():
        raise NotImplementedError(f"{NAME} is not differentiable twice. Use F.cross_entropy for second derivatives.")


def _parts(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    terms: Sequence[float],
    group_name: str,
    block_bytes: int,
) -> tuple[Layer, Goal, Blocks]:
    named = LossTerms(int(terms[0]), int(terms[1]), int(terms[2]), *terms[3:])
    group = current_world(NAME).find_group(NAME, group_name) if group_name else None
    layer = Layer(hidden.contiguous(), weight.contiguous(), bias)
    num_columns = piece_size(named.num_classes, group.group_size) if group else weight.shape[0]
    blocks = plan_blocks(hidden.shape[0], num_columns, hidden.element_size(), block_bytes)
    return layer, Goal(target, class_weight, named, group), blocks


def _sum(*arguments: Any, after: torch.Tensor | None = None) -> list[torch.Tensor]:
    *inputs, wanted = arguments
    layer, goal, blocks = _parts(*inputs)
    sums = Sums(layer, blocks, Wanted(*wanted)) if any(wanted) else None
    losses, _ = losses_of(layer, goal, blocks, sums)
    return [_handle(), losses.sum(), *_grads(layer.hidden, sums)]


def _sum_shapes(*arguments: Any, after: Any = None) -> list[torch.Tensor]:
    *inputs, wanted = arguments
    layer, _, blocks = _parts(*inputs)
    grads = _grads(layer.hidden, Sums(layer, blocks, Wanted(*wanted)) if any(wanted) else None)
    return [_handle(), layer.hidden.new_empty((), dtype=wide_dtype(layer.hidden.dtype)), *grads]


def _rows(*arguments: Any, after: torch.Tensor | None = None) -> list[torch.Tensor]:
    layer, goal, blocks = _parts(*arguments)
    return [_handle(), *losses_of(layer, goal, blocks, None)]


def _rows_shapes(hidden: torch.Tensor, *_: Any, after: Any = None) -> list[torch.Tensor]:
    wide = wide_dtype(hidden.dtype)
    return [_handle(), *(hidden.new_empty(hidden.shape[:1], dtype=wide) for _ in range(2))]


def _backward(grad: torch.Tensor, *arguments: Any) -> list[torch.Tensor]:
    layer, goal, blocks = _parts(*arguments[:5], *arguments[6:9])
    log_sums, wanted = arguments[5], arguments[9]
    sums = Sums(layer, blocks, Wanted(*wanted))
    add_gradients(layer, goal, blocks, log_sums, grad, sums)
    return _grads(layer.hidden, sums)


def _backward_shapes(grad: torch.Tensor, *arguments: Any) -> list[torch.Tensor]:
    layer, _, blocks = _parts(*arguments[:5], *arguments[6:9])
    return _grads(layer.hidden, Sums(layer, blocks, Wanted(*arguments[9])))


def _grads(hidden: torch.Tensor, sums: Sums | None) -> list[torch.Tensor]:
    """The gradients; those that are not wanted are empty."""
    grads = (None, None, None) if sums is None else (sums.hidden, sums.weight, sums.bias)
    return [hidden.new_empty(0) if grad is None else grad for grad in grads]


def _handle() -> torch.Tensor:
    """A tensor for the next collective operator to depend on, so that it stays behind this one."""
    return torch.zeros((), dtype=torch.int64)


_LAYER: Final = "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight"
_TERMS: Final = "float[] terms, str group_name, int block_bytes"
define(f"linear_loss_sum({_LAYER}, {_TERMS}, bool[] wanted, *, Tensor? after=None) -> Tensor[]", _sum, _sum_shapes)
define(f"linear_loss_rows({_LAYER}, {_TERMS}, *, Tensor? after=None) -> Tensor[]", _rows, _rows_shapes)
define(
    f"linear_loss_backward(Tensor grad, {_LAYER}, Tensor log_sums, {_TERMS}, bool[] wanted) -> Tensor[]",
    _backward,
    _backward_shapes,
)
