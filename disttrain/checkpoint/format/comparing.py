"""Finds differences between two saves, of any formats: names, shapes, dtypes, and values where that is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from disttrain.checkpoint.format.box import Box
from disttrain.checkpoint.format.dtypes import dtype_named
from disttrain.checkpoint.format.manifest import Chunk, Manifest, TensorEntry
from disttrain.checkpoint.format.source import Source
from disttrain.checkpoint.plan import plan_load
from disttrain.process_group.calls.packing import pack

_PART_BYTES = 64 << 20


def find_differences(
    first: Source,
    second: Source,
    advance: Callable[[int], None] | None = None,
) -> Iterator[str]:
    """A sentence per difference. With `advance`, which hears how many bytes were compared, of values too."""
    yield from _names("tensor", _all_tensors(first.manifest), _all_tensors(second.manifest))
    yield from _names("value", first.manifest.values, second.manifest.values)
    yield from _names("value per rank", first.manifest.per_rank, second.manifest.per_rank)
    for name, tensor in _all_tensors(first.manifest).items():
        other = second.manifest.tensor_named(name)
        if other is None:
            continue
        if (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
            yield f"{name}: {tensor.dtype}{list(tensor.shape)} and {other.dtype}{list(other.shape)}"
        if advance is not None and tensor.shape == other.shape and name in first.manifest.tensors:
            yield from _tensor(name, first, second, advance)
    if advance is not None:
        yield from _values(first, second)


def compared_bytes(source: Source) -> int:
    """The number of bytes of the first save that a comparison of values reads."""
    return sum(tensor.num_bytes for tensor in source.manifest.tensors.values())


def _all_tensors(manifest: Manifest) -> dict[str, TensorEntry]:
    named = {name: manifest.tensor_named(name) for name in (*manifest.tensors, *manifest.same_as)}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _names(kind: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(first.keys() - second.keys()):
        yield f"{name}: a {kind} of the first alone"
    for name in sorted(second.keys() - first.keys()):
        yield f"{name}: a {kind} of the second alone"


def _tensor(name: str, first: Source, second: Source, advance: Callable[[int], None]) -> Iterator[str]:
    shape = first.manifest.tensors[name].shape
    num_different, largest = 0, 0.0
    for box in Box.whole(shape).split(_PART_BYTES // 8) if 0 not in shape else ():
        left, right = _part(first, name, box), _part(second, name, box)
        advance(left.numel() * left.itemsize)
        unlike = _unlike(left, right)
        distance = (_wide(left) - _wide(right)).abs()[unlike]
        if len(distance):
            num_different += len(distance)
            largest = max(largest, float(distance.nan_to_num(nan=math.inf).max()))
    if num_different:
        num_all = Box.whole(shape).num_elements
        yield f"{name}: {num_different} of {num_all} values differ, by {largest:.6g} at most"


def _unlike(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Marks the elements that differ: in their bits where dtypes are the same, else in value, where NaN is NaN."""
    if first.dtype == second.dtype:
        raw = [tensor.view(torch.uint8).view(-1, tensor.itemsize) for tensor in (first, second)]
        return (raw[0] != raw[1]).any(1)
    left, right = _wide(first), _wide(second)
    return (left != right) & ~(left.isnan() & right.isnan())


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _part(source: Source, name: str, box: Box) -> torch.Tensor:
    saved = source.manifest.tensor_named(name)
    assert saved is not None
    part = torch.empty(box.shape, dtype=dtype_named(saved.dtype))
    targets = {name: {box: part}}
    source.reader.read_tensors(plan_load(source.manifest, targets), targets)
    return part.view(-1)


def _values(first: Source, second: Source) -> Iterator[str]:
    both = first.manifest.values.keys() & second.manifest.values.keys()
    yield from _different(first, second, {name: name for name in both}, first.manifest.values, second.manifest.values)
    for name in sorted(first.manifest.per_rank.keys() & second.manifest.per_rank.keys()):
        left, right = first.manifest.per_rank[name], second.manifest.per_rank[name]
        if left.keys() != right.keys():
            yield f"{name}: of ranks {sorted(left)} and {sorted(right)}"
        ranks = {f"{name} of rank {rank}": rank for rank in left.keys() & right.keys()}
        yield from _different(first, second, ranks, left, right)


def _different(
    first: Source,
    second: Source,
    labels: Mapping[str, Any],
    first_chunks: Mapping[Any, Chunk],
    second_chunks: Mapping[Any, Chunk],
) -> Iterator[str]:
    left = first.reader.read_values({label: first_chunks[key] for label, key in labels.items()})
    right = second.reader.read_values({label: second_chunks[key] for label, key in labels.items()})
    for label in sorted(labels):
        if pack(left[label]) != pack(right[label]):
            yield f"{label}: values differ"
