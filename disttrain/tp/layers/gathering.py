"""Multiplication and communication together: an input that is gathered, and a product that is summed up and scattered.

Where it pays, both are done part by part: a part is multiplied while the next one travels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from disttrain.process_group import ProcessGroup
from disttrain.process_group.watching.ranges import named_in_traces
from disttrain.tp.layers.exchange import Exchange
from disttrain.tp.layers.linears import Matrix
from disttrain.tp.layers.transfers import Finish, gather, reduce_scatter, start_reduce_scatter


@dataclass(frozen=True)
class Cutting:
    """Ranks of the group have parts along `dim`. `exchange`: by which parts travel one by one, None for all at once."""

    group: ProcessGroup
    dim: int
    exchange: Exchange | None

    def __deepcopy__(self, _: object) -> Cutting:
        """Itself: copies of a module exchange as it does."""
        return self


@named_in_traces("tensor parallel gather and multiply")
def gather_and_multiply(
    part: torch.Tensor,
    how: Cutting,
    matrices: Sequence[Matrix],
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The whole input, from parts (..., in) of one shape on all ranks, and its product with each matrix. Collective."""
    group, dim = how.group, how.dim
    if how.exchange is None:
        whole = gather(part, dim, group)
        return whole, [m.times(whole, w, b) for m, w, b in zip(matrices, weights, biases, strict=True)]
    part = part.contiguous()
    lead, rows, depth = math.prod(part.shape[:dim]), math.prod(part.shape[dim:-1]), part.shape[-1]
    whole = part.new_empty((*part.shape[:dim], part.shape[dim] * group.group_size, *part.shape[dim + 1 :]))
    parts = whole.view(lead, group.group_size, rows, depth).movedim(1, 0)
    blocks = part.view(lead, rows, depth)
    widths = [weight.shape[matrix.out_dim] for matrix, weight in zip(matrices, weights, strict=True)]
    results = [part.new_empty((lead, group.group_size, rows, width)) for width in widths]
    for source, block in how.exchange.gather(blocks, parts):
        for matrix, weight, bias, result in zip(matrices, weights, biases, results, strict=True):
            multiply_into(result[:, source], block, matrix, weight, bias)
    return whole, [result.view(*whole.shape[:-1], width) for result, width in zip(results, widths, strict=True)]


@named_in_traces("tensor parallel multiply and scatter")
def multiply_and_scatter(part: torch.Tensor, weight: torch.Tensor, matrix: Matrix, how: Cutting) -> torch.Tensor:
    """This rank's part of the sum of all ranks' products, from their columns (..., in) of the input. Collective."""
    group, dim = how.group, how.dim
    if how.exchange is None:
        return reduce_scatter(matrix.times(part, weight, None), dim, group)
    width, depth = weight.shape[matrix.out_dim], part.shape[-1]
    lead, rows = math.prod(part.shape[:dim]), math.prod(part.shape[dim:-1]) // group.group_size
    x = part.contiguous().view(lead, group.group_size, rows, depth)
    terms = how.exchange.sum((lead, rows, width), part.dtype)
    for step in range(1, group.group_size):
        # What others wait for comes first; this rank's own is multiplied while that travels.
        target = (group.group_rank + step) % group.group_size
        product = part.new_empty((lead, rows, width))
        multiply_into(product, x[:, target], matrix, weight, None)
        terms.send(target, product)
    product = part.new_empty((lead, rows, width))
    multiply_into(product, x[:, group.group_rank], matrix, weight, None)
    shape = (*part.shape[:dim], part.shape[dim] // group.group_size, *part.shape[dim + 1 : -1], width)
    return terms.finish(product).view(shape)


@named_in_traces("tensor parallel start scatter")
def start_scatter(whole: torch.Tensor, how: Cutting) -> Finish:
    """Begin to sum all ranks' tensors; of that each keeps its part. Collective."""
    group, dim = how.group, how.dim
    if how.exchange is None:
        return start_reduce_scatter(whole, dim, group)
    shape = (*whole.shape[:dim], whole.shape[dim] // group.group_size, *whole.shape[dim + 1 :])
    lead, rows = math.prod(shape[:dim]), math.prod(shape[dim:-1])
    pieces = whole.view(lead, group.group_size, rows, shape[-1]).movedim(1, 0)
    terms = how.exchange.sum((lead, rows, shape[-1]), whole.dtype)
    for step in range(1, group.group_size):
        target = (group.group_rank + step) % group.group_size
        terms.send(target, pieces[target])
    return lambda: terms.finish(pieces[group.group_rank]).view(shape)


def multiply_into(
    result: torch.Tensor, x: torch.Tensor, matrix: Matrix, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """result (lead, rows, out), of any strides, = x (lead, rows, in) times the matrix."""
    transposed = weight.t() if matrix.out_dim == 0 else weight
    if len(x) == 1:
        if bias is None:
            torch.mm(x[0], transposed, out=result[0])
        else:
            torch.addmm(bias, x[0], transposed, out=result[0])
        return
    torch.bmm(x, transposed.expand(len(x), *transposed.shape), out=result)
    if bias is not None:
        result += bias
