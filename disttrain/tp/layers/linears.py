"""Modules that multiply by a matrix: their matrices, and the cuts by columns or rows.

Megatron-LM (arXiv 1909.08053) cuts the first matrix of a pair by its columns and the second by its rows, so that
nothing is sent between the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from disttrain.autocast import is_within_autocast
from disttrain.dtensor import DTensor, Replicate, Shard, StridedShard
from disttrain.errors import LayoutError, ShardingError
from disttrain.kernels.float8.linear import Float8Linear, Recipe, float8_product
from disttrain.tp.layers.axis import Axis
from disttrain.tp.layers.params import REPLICATED, Cut, Piece


@dataclass(frozen=True)
class Matrix:
    """The order of a module's matrix: (out, in), as in nn.Linear, or (in, out)."""

    out_dim: int

    has_own_backward: ClassVar[bool] = False
    """True where a product must be left to autograd whole, and is no part of a larger function."""

    @property
    def in_dim(self) -> int:
        return 1 - self.out_dim

    def times(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x (..., in) -> (..., out)."""
        return F.linear(x, weight if self.out_dim == 0 else weight.t(), bias)

    def times_transposed(self, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """grad (rows, out) -> (rows, in)."""
        return grad.mm(weight if self.out_dim == 0 else weight.t())

    def add_times_transposed(self, total: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The same, added to `total` in place."""
        return total.addmm_(grad, weight if self.out_dim == 0 else weight.t())

    def weight_grad(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """grad (rows, out), x (rows, in)."""
        return grad.t().mm(x) if self.out_dim == 0 else x.t().mm(grad)


@dataclass(frozen=True)
class Float8Matrix(Matrix):
    """That of a layer that multiplies this rank's part in float8, with scales of this rank's own."""

    recipe: Recipe

    has_own_backward: ClassVar[bool] = True

    def times(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return float8_product(x, weight, bias, self.recipe)


def input_grad(
    matrices: Sequence[Matrix], grads: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The gradient (rows, in) of what several layers were given, from those of their results, (rows, out) each.

    Each further product reads and writes the sum. Where all of their outputs together are no more than the inputs, it
    takes less to put them side by side, as keys and values that are shared by many queries are, and to multiply once.
    """
    first, *others = matrices
    num_outputs = sum(grad.shape[1] for grad in grads)
    are_alike = all(matrix.out_dim == first.out_dim for matrix in others)
    if others and are_alike and num_outputs <= weights[0].shape[first.in_dim]:
        return first.times_transposed(torch.cat([*grads], 1), torch.cat([*weights], first.out_dim))
    total = first.times_transposed(grads[0], weights[0])
    for matrix, grad, weight in zip(others, grads[1:], weights[1:], strict=True):
        matrix.add_times_transposed(total, grad, weight)
    return total


def parameter_grads(
    matrix: Matrix, cuts: tuple[Cut, Cut], wanted: Sequence[Any], rows: torch.Tensor, grad: Any
) -> Sequence[torch.Tensor | None]:
    """Gradients of weight and bias, each where it is wanted. `rows` (rows, in) were multiplied, and `grad` is that
    of the results (rows, out)."""
    weight, bias = wanted
    return (
        None if weight is None else cuts[0].grad(matrix.weight_grad(grad, rows), weight._spec),
        None if bias is None else cuts[1].grad(grad.sum(0), bias._spec),
    )


_CONV1D = ("transformers.pytorch_utils", "Conv1D")
"""GPT-2's linear layer, whose matrix is (in, out). Known by its name: transformers need not be there."""


def matrix_of(module: nn.Module) -> Matrix | None:
    """None when the module is something else, or a linear layer with a forward of its own."""
    if type(module).forward is nn.Linear.forward:
        return Matrix(out_dim=0)
    if isinstance(module, Float8Linear):
        return Float8Matrix(0, module.recipe)
    is_conv1d = any((cls.__module__, cls.__qualname__) == _CONV1D for cls in type(module).__mro__)
    return Matrix(out_dim=1) if is_conv1d else None


def column_cuts(module: nn.Module, matrix: Matrix, axis: Axis, head_dim: int | None, num_blocks: int) -> dict[str, Cut]:
    """Cuts by which each rank has some of the outputs.

    Args: head_dim    outputs stay together in heads of so many; with fewer heads than ranks, ranks share one.
          num_blocks  the outputs are so many equal blocks, such as query, key and value; each is cut for itself.
    Raises: ShardingError when heads or blocks don't divide.
    """
    out_features = _matrix(module).shape[matrix.out_dim]
    block_size = out_features // num_blocks
    if out_features % num_blocks:
        _refuse(axis, f"{out_features} outputs are no {num_blocks} equal blocks.", "Give another num_blocks.")
    unit = head_dim or 1
    if block_size % unit:
        _refuse(axis, f"{block_size} outputs are no whole heads of {unit}.", "Give the model's head_dim.")
    num_units = block_size // unit
    if head_dim and num_units < axis.size and axis.size % num_units == 0:
        first = axis.rank * num_units // axis.size * unit
        return {
            name: Cut(Replicate(), piece=Piece(dim, first, unit, num_blocks))
            for name, dim in (("weight", matrix.out_dim), ("bias", 0))
        }
    if num_units % axis.size and (head_dim or num_blocks > 1):
        what = f"{num_units} heads of {unit}" if head_dim else f"blocks of {block_size} outputs"
        more = ", or a multiple of it" if head_dim else ""
        _refuse(
            axis,
            f"{what} don't divide among {axis.size} ranks.",
            f"Make the axis a divisor of {num_units}{more}: {_divisors(num_units)}.",
        )
    if num_blocks == 1:
        return {"weight": Cut(Shard(matrix.out_dim)), "bias": Cut(Shard(0))}
    share = block_size // axis.size
    # Of a vector in blocks a rank would have several pieces, which could not be cut further; it is small.
    bias = Cut(Replicate(), piece=Piece(0, axis.rank * share, share, num_blocks))
    return {"weight": Cut(StridedShard(matrix.out_dim, num_blocks)), "bias": bias}


def row_cuts(matrix: Matrix) -> dict[str, Cut]:
    """Cuts by which each rank has some of the inputs. The bias is added to the sum.

    Where ranks have parts of the sum, each gathers the gradient of all of it, so that the bias's is whole on each.
    """
    return {"weight": Cut(Shard(matrix.in_dim)), "bias": REPLICATED}


def local_of(tensor: Any) -> torch.Tensor:
    """A plain tensor itself, of a DTensor this rank's part."""
    local: torch.Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """A backward computes in the dtypes of its forward, whatever is on around it."""
    if is_within_autocast(device):
        with torch.autocast(device.type, enabled=False):
            yield
    else:
        yield


def refuse_second_derivative(operation: str) -> None:
    """Raise LayoutError within a backward pass that is to be differentiated itself (`create_graph=True`)."""
    if torch.is_grad_enabled():
        raise LayoutError(
            operation,
            "the backward pass of a cut layer is asked for its own derivative (create_graph=True).",
            "Compute that part with DTensors, which have second derivatives, or leave create_graph out.",
        )


def _matrix(module: nn.Module) -> torch.Tensor:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)


def _refuse(axis: Axis, problem: str, remedy: str) -> None:
    raise ShardingError("ColwiseParallel", problem, remedy, rank=axis.world_rank, where=str(axis.mesh.layout))
