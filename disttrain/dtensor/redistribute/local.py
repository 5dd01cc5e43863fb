"""Runs the steps of a redistribution plan on this rank's part."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from disttrain.dtensor.redistribute.order_keys import from_order_keys, order_keys
from disttrain.dtensor.redistribute.plan import (
    AllGather,
    AllReduce,
    AllToAll,
    MakePartial,
    ReduceScatter,
    Split,
    Step,
    merged,
    plan_redistribute,
)
from disttrain.dtensor.redistribute.transfers import all_gather, all_reduce, exchange, reduce_scatter
from disttrain.dtensor.spec.layout import Layout, Spec
from disttrain.dtensor.spec.placement import NormPartial, Partial, Placement
from disttrain.dtensor.spec.shard_sizes import cut
from disttrain.errors import LayoutError
from disttrain.mesh import DeviceMesh
from disttrain.pieces import piece, piece_size


def redistribute_local(local: torch.Tensor, spec: Spec, layout: Layout) -> torch.Tensor:
    """This rank's part of the tensor that `spec` describes, in layout `layout`.

    Returns `local` itself when nothing is to be done. Collective: every rank of the mesh.
    """
    if spec.layout == layout:
        return local
    if spec.mesh != layout.mesh:
        raise LayoutError(
            "redistribute",
            f"the tensor lies on {spec.mesh!r}, the target on {layout.mesh!r}.",
            "Redistribute within one mesh; go through full_tensor() and distribute_tensor() to change it.",
            rank=spec.mesh.world.rank,
        )
    placements = list(spec.placements)
    steps = plan_redistribute(spec.placements, layout.placements)
    for step in merged(steps, spec.placements, spec.shape, spec.mesh.shape) if len(steps) > 1 else steps:
        local = _run(step, local, spec, placements)
        for axis in step.axes:
            placements[axis] = step.result
    return local


def _run(step: Step, local: torch.Tensor, spec: Spec, placements: list[Placement]) -> torch.Tensor:
    mesh, axis = spec.mesh, step.axes[0]
    match step:
        case AllGather():
            size = _extent(spec, placements, step.dim, axis)
            return _by_blocks(_all_gather, local, step.dim, step.num_blocks, size, mesh, step.axes)
        case AllToAll():
            size = _extent(spec, placements, step.source_dim, axis)
            return _all_to_all(local, step.source_dim, step.dim, size, mesh, axis)
        case AllReduce():
            return _all_reduce(local, step.partial, mesh, step.axes)
        case ReduceScatter():
            return _reduce_scatter(local, step.dim, step.partial, mesh, axis)
        case Split():
            return _by_blocks(_split, local, step.dim, step.num_blocks, local.shape[step.dim], mesh, step.axes)
        case MakePartial():
            return _make_partial(local, step.partial, mesh.get_local_rank(axis))
    raise AssertionError(step)


def _extent(spec: Spec, placements: list[Placement], dim: int, axis: int) -> int:
    """The size that tensor dim `dim` has before mesh axis `axis` cuts it: what the earlier axes leave of it."""
    size = spec.shape[dim]
    for earlier in range(axis):
        if placements[earlier].cut_dim == dim:
            size = cut(size, placements[earlier], spec.mesh.shape[earlier], spec.mesh.get_local_rank(earlier))
    return size


def _by_blocks(
    run: Callable[[torch.Tensor, int, int, DeviceMesh, tuple[int, ...]], torch.Tensor],
    local: torch.Tensor,
    dim: int,
    num_blocks: int,
    size: int,
    mesh: DeviceMesh,
    axes: tuple[int, ...],
) -> torch.Tensor:
    """Do to each block of `dim`, which has `size` elements in all, what `run` does to a dim."""
    if num_blocks == 1:
        return run(local, dim, size, mesh, axes)
    blocks = local.unflatten(dim, (num_blocks, local.shape[dim] // num_blocks))
    return run(blocks, dim + 1, size // num_blocks, mesh, axes).flatten(dim, dim + 1)


def _split(local: torch.Tensor, dim: int, size: int, mesh: DeviceMesh, axes: tuple[int, ...]) -> torch.Tensor:
    (axis,) = axes
    own_size, offset = piece(size, mesh.shape[axis], mesh.get_local_rank(axis))
    # A view would keep the memory of the whole alive, and writes to it would reach the whole.
    return local.narrow(dim, offset, own_size).clone(memory_format=torch.contiguous_format)


def _all_gather(local: torch.Tensor, dim: int, size: int, mesh: DeviceMesh, axes: tuple[int, ...]) -> torch.Tensor:
    num_pieces = math.prod(mesh.shape[axis] for axis in axes)
    padded = _padded(local, dim, piece_size(size, num_pieces))
    gathered = all_gather(padded, mesh.group_along(axes))
    return _moved_back(gathered.narrow(0, 0, size), dim)


def _all_to_all(local: torch.Tensor, source_dim: int, dim: int, size: int, mesh: DeviceMesh, axis: int) -> torch.Tensor:
    """Pieces of `source_dim`, whose whole has `size` elements, to pieces of `dim`."""
    num_pieces, position = mesh.shape[axis], mesh.get_local_rank(axis)
    outgoing = [piece(local.shape[dim], num_pieces, peer) for peer in range(num_pieces)]
    incoming_lengths = [piece(size, num_pieces, peer)[0] for peer in range(num_pieces)]
    sent = [local.narrow(dim, offset, length).contiguous() for length, offset in outgoing]
    shape = list(sent[position].shape)
    shapes = []
    for length in incoming_lengths:
        shape[source_dim] = length
        shapes.append(tuple(shape))
    return torch.cat(exchange(sent, shapes, mesh.get_group(axis)), source_dim)


def _reduce_scatter(local: torch.Tensor, dim: int, partial: Partial, mesh: DeviceMesh, axis: int) -> torch.Tensor:
    if _is_extremum_of_floats(local, partial):
        keys = order_keys(local, nan_is_highest=partial.reduce_op == "max")
        return from_order_keys(_reduce_scatter(keys, dim, partial, mesh, axis), local.dtype)
    num_pieces, size = mesh.shape[axis], local.shape[dim]
    step_size = piece_size(size, num_pieces)

    def reduced(values: torch.Tensor) -> torch.Tensor:
        return reduce_scatter(_padded(values, dim, step_size * num_pieces), partial.reduce_op, mesh.get_group(axis))

    scattered = _averaged(local, num_pieces, reduced) if _is_average_of_floats(local, partial) else reduced(local)
    own_size, _ = piece(size, num_pieces, mesh.get_local_rank(axis))
    return _moved_back(scattered.narrow(0, 0, own_size), dim)


def _moved_back(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Contiguous values with what is in front as `dim`."""
    moved = values.transpose(0, dim)
    if not dim or not moved.is_contiguous():
        return moved.contiguous()
    # Dims of one element have changed places, with strides that views of the same memory would not have: torch takes
    # such views for overlapping ones.
    return moved.view(-1).view(moved.shape)


def _padded(local: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """A contiguous copy with `dim` in front, where collectives put pieces together, and zeros up to `size`."""
    moved = local.transpose(0, dim)
    if moved.shape[0] == size:
        return moved.contiguous()
    padded = moved.new_zeros((size, *moved.shape[1:]))
    padded.narrow(0, 0, moved.shape[0]).copy_(moved)
    return padded


def _all_reduce(local: torch.Tensor, partial: Partial, mesh: DeviceMesh, axes: tuple[int, ...]) -> torch.Tensor:
    if isinstance(partial, NormPartial):
        local = local.contiguous()  # so that its powers are contiguous too; no other copy of these is made
    group = mesh.group_along(axes)
    if isinstance(partial, NormPartial):
        if partial.order == float("inf"):
            return _all_reduce(local, Partial("max"), mesh, axes)
        # In 64 bits, since powers of what fits into fewer need not fit.
        powers = _signed_power(local.double(), partial.order)
        return _signed_power(all_reduce(powers, "sum", group), 1.0 / partial.order).to(local.dtype)
    if _is_extremum_of_floats(local, partial):
        keys = order_keys(local, nan_is_highest=partial.reduce_op == "max")
        return from_order_keys(_all_reduce(keys, partial, mesh, axes), local.dtype)
    if _is_average_of_floats(local, partial):
        return _averaged(
            local, group.group_size, lambda values: all_reduce(values.contiguous(), partial.reduce_op, group)
        )
    return all_reduce(local.clone(memory_format=torch.contiguous_format), partial.reduce_op, group)


def _signed_power(values: torch.Tensor, exponent: float) -> torch.Tensor:
    """A norm that was written to may be negative on the one rank that holds it; then its power is negative, too."""
    magnitudes = values.abs()
    if exponent == 2.0:
        return magnitudes.mul_(values)
    return (magnitudes.sqrt_() if exponent == 0.5 else magnitudes.pow_(exponent)).copysign_(values)


def _is_average_of_floats(local: torch.Tensor, partial: Partial) -> bool:
    return partial.reduce_op == "avg" and (local.is_floating_point() or local.is_complex())


def _averaged(local: torch.Tensor, num_ranks: int, reduce: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Averages by `reduce` numbers that are scaled down, so that their sum fits wherever the average does: after a
    write to an average, all ranks hold the value. Divided by a power of two, which loses no bits."""
    factor = 2.0 ** (num_ranks - 1).bit_length()
    # Numbers of 16 bits would lose some where they are small.
    wide = local.float() if local.dtype == torch.float16 else local
    return reduce(wide / factor).mul_(factor).to(local.dtype)


def _is_extremum_of_floats(local: torch.Tensor, partial: Partial) -> bool:
    return partial.reduce_op in ("max", "min") and local.is_floating_point()


def _make_partial(local: torch.Tensor, partial: Partial, position: int) -> torch.Tensor:
    # Dividing the value among the ranks would lose bits; one rank holds all of it instead.
    is_largest = isinstance(partial, NormPartial) and partial.order == float("inf")
    if position == 0 or partial.reduce_op in ("avg", "min", "max") or is_largest:
        return local.clone()
    if partial.reduce_op == "product":
        return torch.ones_like(local)
    return torch.zeros_like(local)
