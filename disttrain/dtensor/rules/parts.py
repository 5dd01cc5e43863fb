"""Facts about this rank's parts, and the few collectives that put small results together.

Whether a collective is called depends on layouts alone, which all ranks know; never on what a rank holds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from disttrain.dtensor.redistribute.transfers import all_gather, all_reduce
from disttrain.dtensor.rules.base import OpCall, Propagation, result_specs
from disttrain.dtensor.spec.layout import Layout, Spec
from disttrain.dtensor.spec.placement import Partial
from disttrain.mesh import DeviceMesh


def operand_part(call: OpCall, propagation: Propagation, index: int) -> Spec:
    """Operand `index`, which is a DTensor, as it lies when the operator runs."""
    spec, layout = call.operands[index], propagation.operands[index]
    assert spec is not None
    assert layout is not None
    return spec.with_layout(layout)


def result_part(call: OpCall, propagation: Propagation) -> Spec:
    """The first result as it lies."""
    return result_specs(call, propagation)[0]


def cutting_axes(layout: Layout, dims: Collection[int]) -> tuple[int, ...]:
    """The mesh axes that cut one of `dims`."""
    return tuple(axis for axis, placement in enumerate(layout.placements) if placement.cut_dim in dims)


def partials_of(call: OpCall, index: int) -> list[Partial]:
    """The kinds of Partial that operand `index` is in along some axis."""
    spec = call.operands[index]
    kinds = {kind for kind in spec.placements if isinstance(kind, Partial)} if spec is not None else set()
    return sorted(kinds, key=repr)


def kept(dim: int, removed: Collection[int]) -> int:
    """The position of dim `dim` once the dims `removed` are gone."""
    return dim - sum(1 for other in removed if other < dim)


def lowest(dtype: torch.dtype) -> float | int | bool:
    """The lowest value of `dtype`."""
    if dtype == torch.bool:
        return False
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> float | int | bool:
    """The highest value of `dtype`."""
    if dtype == torch.bool:
        return True
    return float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max


def summed(values: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int]) -> torch.Tensor:
    """The sum over the ranks along `axes`, of values whose memory it may take. Collective."""
    for axis in axes:
        values = all_reduce(values, "sum", mesh.get_group(axis))
    return values


def largest(values: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int]) -> torch.Tensor:
    """The maximum over the ranks along `axes`, of values whose memory it may take. Collective."""
    for axis in axes:
        values = all_reduce(values, "max", mesh.get_group(axis))
    return values


def gathered(values: torch.Tensor, mesh: DeviceMesh, axis: int) -> torch.Tensor:
    """The values of the ranks along `axis`, stacked along a new first dim. Collective."""
    num_pieces = mesh.shape[axis]
    sent = values.contiguous()
    return all_gather(sent.view(-1), mesh.get_group(axis)).view(num_pieces, *sent.shape)


def owned(index: torch.Tensor, part: Spec, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Places along `dim` of the whole, as places in this rank's part, and which of them are there.

    Those that are not have place 0; no cut of `dim` may be StridedShard.
    """
    size, offset = part.local_shape[dim], part.local_offset[dim]
    local_index = torch.where(index < 0, index + (part.shape[dim] - offset), index - offset)
    is_here = (local_index >= 0) & (local_index < size)
    return local_index.masked_fill_(~is_here, 0), is_here
