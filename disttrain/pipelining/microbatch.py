"""A batch as microbatches, and their outputs as one again. Names are those of torch.distributed.pipelining.microbatch.

All microbatches have one size, so the mean of their losses is that of the batch, and all messages fit one buffer. A
batch that does not divide is refused; torch makes the first ones larger, and fewer of them where there are not enough
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from disttrain.arguments import arguments_of
from disttrain.dtensor import DTensor
from disttrain.errors import ScheduleError, ShapeError
from disttrain.pipelining._torch import flatten, flatten_with_paths, unflatten

_SPLIT = "split_args_kwargs_into_chunks"
_MERGE = "merge_chunks"


@dataclass(frozen=True)
class TensorChunkSpec:
    """Tensors are cut along `split_dim`. In a spec None stands for what all microbatches are given alike."""

    split_dim: int

    @staticmethod
    def from_tuple(chunk_dims: tuple[int | None, ...]) -> tuple[TensorChunkSpec | None, ...]:
        """One spec per positional argument."""
        return tuple(_spec(dim) for dim in chunk_dims)

    @staticmethod
    def from_dict(chunk_dims: Mapping[str, int | None]) -> dict[str, TensorChunkSpec | None]:
        """One spec per keyword argument."""
        return {name: _spec(dim) for name, dim in chunk_dims.items()}


class Microbatches(list[Any]):
    """An argument, or a part of one, that is cut already: one value for each microbatch, handed on as they are.

    So microbatches may have several lengths; schedules need dynamic_shapes=True for that. With the class itself as
    output_merge_spec, outputs come back as one of these, and are not joined.
    """


@arguments_of(_SPLIT, remedy="Give a tuple of arguments, a dict of others, a number, and specs that are nested so.")
def split_args_kwargs_into_chunks(
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    chunks: int,
    args_chunk_spec: Sequence[Any] | None = None,
    kwargs_chunk_spec: Mapping[str, Any] | None = None,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """The arguments of each of `chunks` microbatches.

    Arguments are nested as one likes. Without a spec, tensors are cut along dim 0, as views, and all else is given to
    each microbatch as it is, tensors of no dims included. A spec, one per argument, is a TensorChunkSpec or None for
    all that the argument holds, or nested as the argument is. Keyword arguments that the spec does not name go without.
    Of a DTensor each rank cuts its own part. A BlockMask of one row for the whole batch is given to all. What stands in
    `Microbatches` is not cut.
    Raises: ScheduleError when a size is no multiple of `chunks`; ShapeError when there is no such dim;
            ScheduleError when a spec is not nested as its argument is.
    """
    if chunks < 1:
        raise ScheduleError(_SPLIT, f"{chunks} microbatches were asked for.", "Ask for at least one.")
    kwargs = kwargs or {}
    args_spec = [_DEFAULT] * len(args) if args_chunk_spec is None else args_chunk_spec
    if len(args_spec) != len(args):
        raise ScheduleError(
            _SPLIT,
            f"There are {len(args)} positional arguments, and specs for {len(args_spec)}.",
            "Give one spec for each; None for what is not cut.",
        )
    if unknown := sorted(set(kwargs_chunk_spec or {}) - set(kwargs)):
        raise ScheduleError(_SPLIT, f"There is a spec for {unknown[0]!r}, which is no argument.", "Leave it out.")
    kwargs_spec = {name: (kwargs_chunk_spec or {}).get(name, _DEFAULT) for name in kwargs}
    positional = [
        _pieces(f"args[{index}]", value, spec, chunks)
        for index, (value, spec) in enumerate(zip(args, args_spec, strict=True))
    ]
    named = {name: _pieces(name, value, kwargs_spec[name], chunks) for name, value in kwargs.items()}
    return (
        [tuple(pieces[index] for pieces in positional) for index in range(chunks)],
        [{name: pieces[index] for name, pieces in named.items()} for index in range(chunks)],
    )


@arguments_of(_MERGE, remedy="Give a list of the outputs of microbatches.")
def merge_chunks(chunks: Sequence[Any], chunk_spec: Any = None) -> Any:
    """The outputs of microbatches as that of the batch.

    Without a spec, tensors are joined along dim 0; those of no dims, such as losses, are stacked. A spec is one for all
    that an output holds, or nested as the output is; what it has None for must be the same in all microbatches, and
    so must all that is no tensor. With `Microbatches` as the spec nothing is joined.
    Raises: ScheduleError when outputs are not nested alike, or differ where they must not.
    """
    if isinstance(chunks, torch.Tensor | Mapping):
        raise TypeError(f"the outputs are a {type(chunks).__name__}, and no list")
    if not chunks:
        raise ScheduleError(_MERGE, "There is nothing to merge.", "Give the outputs of at least one microbatch.")
    if chunk_spec is Microbatches:
        return Microbatches(chunks)
    spec = _DEFAULT if chunk_spec is None else chunk_spec
    _, structure = flatten(chunks[0])
    flat = []
    for chunk in chunks:
        paths, own_structure = flatten_with_paths(chunk, _is_whole)
        if own_structure != structure:
            raise ScheduleError(
                _MERGE, f"Outputs are nested as {structure} and as {own_structure}.", "Return the same each time."
            )
        flat.append(paths)
    specs = _spread(_MERGE, "output", chunks[0], spec)
    merged = [
        _merged(f"output{values[0][0]}", [value for _, value in values], each)
        for values, each in zip(zip(*flat, strict=True), specs, strict=True)
    ]
    return unflatten(merged, structure)


_DEFAULT = TensorChunkSpec(0)


def _spec(dim: int | None) -> TensorChunkSpec | None:
    return None if dim is None else TensorChunkSpec(dim)


def _is_whole(value: Any) -> bool:
    return isinstance(value, BlockMask)


def _spread(operation: str, name: str, value: Any, spec: Any) -> list[TensorChunkSpec | None]:
    """One spec for each leaf of `value`: a spec for several leaves is repeated."""
    specs, structure = flatten(spec)
    try:
        parts = structure.flatten_up_to(value)
    except ValueError as error:
        raise ScheduleError(
            operation,
            f"The spec of {name} is not nested as {name} is: {error}",
            "Give one spec for all that it holds, or nest them alike.",
        ) from error
    for leaf_spec in specs:
        if not isinstance(leaf_spec, TensorChunkSpec | None):
            raise ScheduleError(
                operation, f"The spec of {name} holds {leaf_spec!r}.", "Write TensorChunkSpec(dim), or None for no cut."
            )
    return [leaf_spec for leaf_spec, part in zip(specs, parts, strict=True) for _ in flatten(part, _is_whole)[0]]


def _pieces(name: str, value: Any, spec: Any, num_pieces: int) -> list[Any]:
    leaves, structure = flatten_with_paths(value, _is_whole)
    specs = _spread(_SPLIT, name, value, spec)
    cut = [
        _cut(f"{name}{path}", leaf, leaf_spec, num_pieces, is_default=spec is _DEFAULT)
        for (path, leaf), leaf_spec in zip(leaves, specs, strict=True)
    ]
    return [unflatten([pieces[index] for pieces in cut], structure) for index in range(num_pieces)]


def _cut(name: str, value: Any, spec: TensorChunkSpec | None, num_pieces: int, *, is_default: bool) -> Sequence[Any]:
    if isinstance(value, Microbatches):
        if len(value) != num_pieces:
            raise ScheduleError(
                _SPLIT, f"{name} holds {len(value)} microbatches, and there are {num_pieces}.", "Give one value each."
            )
        return value
    if spec is None or not isinstance(value, torch.Tensor | BlockMask):
        return [value] * num_pieces
    if isinstance(value, BlockMask):
        return _cut_mask(name, value, num_pieces)
    if is_default and value.ndim == 0:
        return [value] * num_pieces
    dim = spec.split_dim
    if not -value.ndim <= dim < value.ndim:
        raise ShapeError(_SPLIT, f"{name} has {value.ndim} dims, and is to be cut along dim {dim}.", "Give another.")
    if isinstance(value, DTensor):
        mesh, placements = value.device_mesh, value.placements
        return [
            DTensor.from_local(piece, mesh, placements, run_check=False)
            for piece in _cut_evenly(f"this rank's part of {name}", value.to_local(), dim, num_pieces)
        ]
    return _cut_evenly(name, value, dim, num_pieces)


def _cut_evenly(name: str, value: torch.Tensor, dim: int, num_pieces: int) -> Sequence[torch.Tensor]:
    size = value.shape[dim]
    _check_divides(f"{name} has size {size} in dim {dim}", size, num_pieces)
    return value.tensor_split(num_pieces, dim)


def _check_divides(subject: str, size: int, num_pieces: int) -> None:
    if size % num_pieces or size == 0:
        below = size // num_pieces * num_pieces
        sizes = f"{below} or {below + num_pieces}" if below else str(num_pieces)
        alike = " If all microbatches are to have it as it is, give None as its spec." if size == 1 else ""
        raise ScheduleError(
            _SPLIT, f"{subject}, which {num_pieces} microbatches of one size cannot share.", f"Make it {sizes}.{alike}"
        )


def _cut_mask(name: str, mask: BlockMask, num_pieces: int) -> list[BlockMask]:
    """Along its batch, of which it may have one row for all."""
    size = mask.kv_num_blocks.shape[0]
    if size == 1:
        return [mask] * num_pieces
    _check_divides(f"{name} is a mask for {size} rows", size, num_pieces)
    rows = size // num_pieces
    return [_mask_from(mask, first, rows) for first in range(0, size, rows)]


def _mask_from(mask: BlockMask, first: int, rows: int) -> BlockMask:
    whole: Callable[..., torch.Tensor] = mask.mask_mod

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return whole(b + first, h, q, kv)

    def part(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[first : first + rows]

    return BlockMask.from_kv_blocks(
        mask.kv_num_blocks[first : first + rows],
        mask.kv_indices[first : first + rows],
        part(mask.full_kv_num_blocks),
        part(mask.full_kv_indices),
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=mask_mod,
        seq_lengths=mask.seq_lengths,
    )


def _merged(name: str, values: Sequence[Any], spec: TensorChunkSpec | None) -> Any:
    first = values[0]
    if spec is None or not isinstance(first, torch.Tensor):
        if any(not _is_same(first, other) for other in values[1:]):
            raise ScheduleError(
                _MERGE, f"{name} is not the same in all microbatches.", "Return it as a tensor, cut along a dim."
            )
        return first
    _check_joinable(name, values, spec.split_dim)
    if first.ndim == 0:
        return torch.stack(list(values))
    if isinstance(first, DTensor):
        local = torch.cat([value.to_local() for value in values], spec.split_dim)
        return DTensor.from_local(local, first.device_mesh, first.placements, run_check=False)
    return torch.cat(list(values), spec.split_dim)


def _check_joinable(name: str, values: Sequence[torch.Tensor], dim: int) -> None:
    first = values[0].shape
    for value in values:
        others = value.shape
        if len(others) != len(first) or any(
            others[dim_index] != first[dim_index] for dim_index in range(len(first)) if dim_index != dim % len(first)
        ):
            raise ShapeError(
                _MERGE,
                f"{name} has shape {list(first)} in the first microbatch and {list(others)} in another.",
                "Ask for no outputs (return_outputs=False), or for those of each microbatch "
                "(output_merge_spec=Microbatches).",
            )


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return value is other or torch.equal(value, other)
    return bool(value == other)
