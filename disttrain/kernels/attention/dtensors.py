"""Attention of DTensors that are sharded along sequences, heads and positions: each rank's, with the rules for these.

If a mesh axis cuts the queries' heads into more parts than there are heads of keys, keys are replicated along it. A
rank then uses the heads that its queries need, and gradients of keys are partial sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from disttrain.dtensor import DTensor, Partial, Placement, Replicate
from disttrain.errors import LayoutError
from disttrain.kernels.attention.context.current import given_or_current
from disttrain.kernels.attention.context.parts import Parts
from disttrain.kernels.attention.operator import NAME, attention, check_fits
from disttrain.kernels.attention.rules import Rule
from disttrain.mesh import DeviceMesh, axis_of_several
from disttrain.pieces import piece


def attention_of_dtensors(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Rule | None,
    scale: float | None,
    by: str | None,
    axis: DeviceMesh | None,
    parts: Parts | None,
    way: str | None,
) -> DTensor:
    """Computes `attention` of DTensors. Collective where they don't lie alike, and along `axis`."""
    if not (isinstance(query, DTensor) and isinstance(key, DTensor) and isinstance(value, DTensor)):
        kinds = ", ".join(type(tensor).__name__ for tensor in (query, key, value))
        raise LayoutError(
            NAME, f"query, key and value are {kinds}.", "Give DTensors of one mesh, or to_local() of all."
        )
    mesh = query.device_mesh
    axis, parts, way = given_or_current(axis, parts, way)
    axis = axis_of_several(NAME, axis)
    cut_axis = None if axis is None else _index_of(axis, mesh)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _check(name, tensor, query, cut_axis)
    whole_length = None
    if axis is not None and cut_axis is not None:
        parts = parts or _parts_of(query.shape[2], axis.size())
    elif axis is not None:
        whole_length = parts.length if parts is not None else axis.size() * query.shape[2]
    check_fits(query, key, value, mask, whole_length)
    placements = [_placement(*those) for those in zip(query.placements, key.placements, value.placements, strict=True)]
    num_parts = 1
    for index, placement in enumerate(placements):
        num_parts *= mesh.size(index) if placement.is_shard(1) else 1
    # With a head of keys for each of queries both are cut alike, evenly or not.
    shares_heads = key.shape[1] != query.shape[1] and key.shape[1] % num_parts != 0
    others = [Replicate() if shares_heads and placement.is_shard(1) else placement for placement in placements]
    # Where heads are shared, each rank has a term of their gradient.
    grads = [Partial() if shares_heads and placement.is_shard(1) else placement for placement in placements]
    own_query = query.redistribute(placements=placements).to_local()
    own_key, own_value = (
        tensor.redistribute(placements=others).to_local(grad_placements=grads) for tensor in (key, value)
    )
    batch, heads = (_part(query.shape[dim], dim, mesh, placements) for dim in (0, 1))
    if shares_heads:
        served_by = [head * key.shape[1] // query.shape[1] for head in range(heads.start, heads.stop)]
        own_key, own_value = (_needed(tensor, served_by) for tensor in (own_key, own_value))
    rule = None if mask is None else mask.local(batch, heads)
    result = attention(own_query, own_key, own_value, rule, scale=scale, by=by, axis=axis, parts=parts, way=way)
    whole = (*query.shape[:3], value.shape[3])
    strides = (whole[1] * whole[2] * whole[3], whole[2] * whole[3], whole[3], 1)
    return DTensor.from_local(result, mesh, placements, shape=whole, stride=strides)


def _index_of(axis: DeviceMesh, mesh: DeviceMesh) -> int | None:
    """The index of an axis in the tensors' mesh; None of another, of which they have a rank's positions."""
    members = axis.get_group().members
    return next((index for index in range(mesh.ndim) if mesh.get_group(index).members == members), None)


def _parts_of(length: int, num_ranks: int) -> Parts:
    """The positions of each rank as DTensors are cut: one run each."""
    runs = [(first, size) for size, first in (piece(length, num_ranks, rank) for rank in range(num_ranks))]
    return Parts(length, tuple((range(first, first + size),) if size else () for first, size in runs))


def _check(name: str, tensor: DTensor, query: DTensor, cut_axis: int | None) -> None:
    rank = tensor.device_mesh.get_rank()
    if tensor.device_mesh != query.device_mesh:
        raise LayoutError(NAME, f"{name} lies on another mesh than query.", "Put all on one mesh.", rank=rank)
    for axis, placement in enumerate(tensor.placements):
        if axis == cut_axis:
            if not placement.is_shard(2):
                problem = f"mesh axis {axis}, over which positions are cut, lays {name} as {placement}."
                raise LayoutError(NAME, problem, "Cut query, key and value alike: Shard(2).", rank=rank)
        elif not (placement.is_shard(0) or placement.is_shard(1) or placement.is_replicate() or placement.is_partial()):
            raise LayoutError(
                NAME,
                f"mesh axis {axis} lays {name} of shape {tuple(tensor.shape)} as {placement}; only sequences (dim 0) "
                "and heads (dim 1) may be cut, and positions (dim 2) along `axis`.",
                "Redistribute it, or give axis=mesh['cp'].",
                rank=rank,
            )


def _placement(*placements: Placement) -> Placement:
    """The placement of query, key and value along an axis: that of the first of them that is cut."""
    return next((placement for placement in placements if placement.is_shard()), Replicate())


def _part(size: int, dim: int, mesh: DeviceMesh, placements: Sequence[Placement]) -> slice:
    """The part of this rank of a dim of `size`."""
    coordinate, first = mesh.get_coordinate(), 0
    assert coordinate is not None, "a DTensor's ranks lie on its mesh"
    for axis, placement in enumerate(placements):
        if placement.is_shard(dim):
            size, offset = piece(size, mesh.size(axis), coordinate[axis])
            first += offset
    return slice(first, first + size)


def _needed(part: torch.Tensor, served_by: Sequence[int]) -> torch.Tensor:
    """The heads that serve this rank's heads of queries, of all: few in a row where they serve alike many."""
    first, last = (served_by[0], served_by[-1]) if served_by else (0, -1)
    heads = range(first, last + 1)
    if heads and all(served_by.count(head) * len(heads) == len(served_by) for head in heads):
        return part.narrow(1, first, len(heads))
    return part[:, list(served_by)]
