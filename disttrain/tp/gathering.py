"""Gather an input and multiply it; on GPUs, where it is large, part by part as the parts come."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from disttrain.process_group import P2POp, Work, batch_isend_irecv, irecv, isend
from disttrain.tp.axis import Axis
from disttrain.tp.linears import Matrix
from disttrain.tp.transfers import gather

PAYS_FROM_BYTES = 4 << 20
"""Messages of this size take a GPU longer than to launch what sends and multiplies them one by one."""


@dataclass(frozen=True)
class Gather:
    """Parts along `dim` come from the ranks of the axis; `overlap`: one by one, each multiplied when it has come."""

    axis: Axis
    dim: int
    overlap: bool


def pays(axis: Axis, wished: bool | None, part_numel: int, dtype: torch.dtype) -> bool:
    """Whether parts of so many elements are sent one by one under the multiplications: as wished, or where it pays.

    All ranks know the same, so they decide alike.
    """
    if axis.size == 1:
        return False
    if wished is not None:
        return wished
    return axis.mesh.device_type == "cuda" and part_numel * dtype.itemsize >= PAYS_FROM_BYTES


def gather_and_multiply(
    part: torch.Tensor,
    how: Gather,
    matrices: Sequence[Matrix],
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The whole input, from parts (..., in) of one shape on all ranks, and its product with each matrix. Collective."""
    axis, dim = how.axis, how.dim
    if not how.overlap:
        whole = gather(part, dim, axis)
        return whole, [m.times(whole, w, b) for m, w, b in zip(matrices, weights, biases, strict=True)]
    part = part.contiguous()
    lead, rows, depth = math.prod(part.shape[:dim]), math.prod(part.shape[dim:-1]), part.shape[-1]
    # Parts lie one behind the other, so that each comes into contiguous memory.
    parts = part.new_empty((axis.size, lead, rows, depth))
    own = part.view(lead, rows, depth)
    arriving = ring_gather(own, parts, axis)
    widths = [weight.shape[matrix.out_dim] for matrix, weight in zip(matrices, weights, strict=True)]
    results = [part.new_empty((lead, axis.size, rows, width)) for width in widths]
    for step in range(axis.size):
        source = (axis.rank + step) % axis.size
        for work in arriving[step]:
            work.wait()
        here = own if step == 0 else parts[source]
        for matrix, weight, bias, result in zip(matrices, weights, biases, results, strict=True):
            multiply_into(result[:, source], here, matrix, weight, bias)
    parts[axis.rank].copy_(own)
    shape = (*part.shape[:dim], part.shape[dim] * axis.size, *part.shape[dim + 1 : -1])
    whole = parts.movedim(0, 1).reshape(*shape, depth)
    return whole, [result.view(*shape, width) for result, width in zip(results, widths, strict=True)]


def ring_gather(own: torch.Tensor, parts: torch.Tensor, axis: Axis) -> list[list[Work]]:
    """Begin to fill `parts` with the other ranks' contiguous tensors. What [step] waits for is the part of the rank so
    many places after this one; step 0 is this rank's own, which is left to the caller."""
    steps: list[list[Work]] = [[]]
    for step in range(1, axis.size):
        source, target = (axis.rank + step) % axis.size, (axis.rank - step) % axis.size
        messages = [
            P2POp(isend, own, group=axis.group, group_peer=target, tag=step),
            P2POp(irecv, parts[source], group=axis.group, group_peer=source, tag=step),
        ]
        steps.append(batch_isend_irecv(messages))
    return steps


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
