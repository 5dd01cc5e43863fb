"""Plans of saves and loads: which rank writes which part of which tensor, and which part of which file goes where.
Pure.

A save's plan is a function of what all ranks hold, so that each rank can make it by itself. A load's plan is a function
of the boxes that one rank needs, and the manifest.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from disttrain.checkpoint.format.box import Box
from disttrain.checkpoint.format.dtypes import dtype_named
from disttrain.checkpoint.format.manifest import Chunk, Manifest
from disttrain.checkpoint.layout import TensorSpec
from disttrain.errors import CheckpointCorruptError, CheckpointError

SPLIT_BYTES = 4 << 20
"""A part that several ranks hold is split among them when it is larger."""

_MOST_COMPARED = 1 << 14
"""Integers of one tensor that are compared among ranks: no more than the state of a generator, or a few."""
_INTEGERS = frozenset(["bool", "uint8", "int8", "int16", "int32", "int64"])
_NUMBERS = _INTEGERS | {"float16", "bfloat16", "float32", "float64"}


@dataclass(frozen=True)
class Outline:
    """The names and specs of one rank's state, without the values.

    `values` are plain values, equal on all ranks; `per_rank` ones differ; `same_as` maps a tensor's second name to its
    first.
    """

    tensors: Mapping[str, TensorSpec] = field(default_factory=dict)
    values: Sequence[str] = ()
    per_rank: Sequence[str] = ()
    same_as: Mapping[str, str] = field(default_factory=dict)

    @property
    def compared(self) -> list[str]:
        """Names that are compared among ranks before a save: values, and plain tensors that are like values, such as
        counters and states of generators. Others, such as averages of batches, may be each rank's own: see
        `saving/copies_compared.py`."""
        return [*self.values, *(name for name, spec in self.tensors.items() if is_like_a_value(spec))]

    @property
    def plain_tensors(self) -> list[str]:
        """Tensors that are taken to be alike on all ranks that have them."""
        return [name for name, spec in self.tensors.items() if spec.is_plain]

    def to_plain(self) -> list[Any]:
        tensors = {name: spec.to_plain() for name, spec in self.tensors.items()}
        return [tensors, list(self.values), list(self.per_rank), dict(self.same_as)]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> Outline:
        tensors, values, per_rank, same_as = plain
        return cls({name: TensorSpec.from_plain(item) for name, item in tensors.items()}, values, per_rank, same_as)


def is_like_a_value(spec: TensorSpec) -> bool:
    """True if all ranks must have it alike."""
    if not spec.is_plain:
        return False
    shape, dtype = spec.shape, spec.dtype
    return (not shape and dtype in _NUMBERS) or (dtype in _INTEGERS and math.prod(shape) <= _MOST_COMPARED)


@dataclass(frozen=True)
class RankPlan:
    """The part of a save that one rank writes: parts of tensors by name, and values by name."""

    parts: list[tuple[str, Box]] = field(default_factory=list)
    values: list[str] = field(default_factory=list)


def with_one_way(outlines: Sequence[Outline]) -> list[Outline]:
    """The same, but for tensors that are a first tensor's second name on some ranks, and are their own, or another's
    second name, elsewhere: these stand for themselves on all."""
    firsts: dict[str, set[str]] = {}
    for outline in outlines:
        for name, first in (*((name, name) for name in outline.tensors), *outline.same_as.items()):
            firsts.setdefault(name, set()).add(first)
    untied = {name for name, several in firsts.items() if len(several) > 1}
    if not untied:
        return list(outlines)
    return [
        replace(
            outline,
            tensors={
                **outline.tensors,
                **{name: outline.tensors[first] for name, first in outline.same_as.items() if name in untied},
            },
            same_as={name: first for name, first in outline.same_as.items() if name not in untied},
        )
        for outline in outlines
    ]


def plan_save(outlines: Sequence[Outline], differing: Container[str] = ()) -> list[RankPlan]:
    """Plans what each rank writes, given what each has. Every element of every tensor is written by exactly one rank.

    A part that only one rank holds is written by that rank. The other parts are assigned, largest first, to the holder
    with the fewest bytes. A plain value is written by the first rank that has it, and so is each tensor that is
    `differing` among ranks. Raises CheckpointError if ranks have different kinds of leaves under one name.
    """
    _check_kinds(outlines)
    plans = [RankPlan() for _ in outlines]
    load_bytes = [0] * len(outlines)
    shared: list[tuple[int, str, Box, tuple[int, ...]]] = []
    for name, specs in _merged(outlines).items():
        item_size = dtype_named(next(iter(specs)).dtype).itemsize
        for box, holders in _parts(name, specs).items():
            if len(holders) == 1 or name in differing:
                plans[holders[0]].parts.append((name, box))
                load_bytes[holders[0]] += box.num_elements * item_size
            else:
                pieces = box.split(_split_elements(box, item_size, len(holders)))
                shared += [(piece.num_elements * item_size, name, piece, holders) for piece in pieces]
    for num_bytes, name, box, holders in sorted(shared, key=lambda item: (-item[0], item[1], item[2])):
        writer = min(holders, key=load_bytes.__getitem__)
        plans[writer].parts.append((name, box))
        load_bytes[writer] += num_bytes
    _plan_values(outlines, plans)
    return plans


def _check_kinds(outlines: Sequence[Outline]) -> None:
    """No name may be a tensor on one rank and a value on another."""
    tensors = {name for outline in outlines for name in (*outline.tensors, *outline.same_as)}
    values = {name for outline in outlines for name in outline.values}
    per_rank = {name for outline in outlines for name in outline.per_rank}
    mixed = sorted(tensors & values | tensors & per_rank | values & per_rank)
    if mixed:
        raise CheckpointError(
            "save",
            f"{mixed[0]!r} is a tensor, a value or a PerRank, depending on the rank.",
            "Give them names of their own.",
        )


def _split_elements(box: Box, item_size: int, num_holders: int) -> int:
    """The most elements of each piece of a shared part."""
    if box.num_elements * item_size <= SPLIT_BYTES:
        return box.num_elements
    return max(SPLIT_BYTES // item_size, -(-box.num_elements // num_holders))


def _merged(outlines: Sequence[Outline]) -> dict[str, dict[TensorSpec, tuple[int, ...]]]:
    """Maps each tensor's name to its specs, and each spec to the ranks that have it so."""
    if all(outline is outlines[0] for outline in outlines):
        every = tuple(range(len(outlines)))
        return {name: {spec: every} for name, spec in outlines[0].tensors.items()}
    ranks: dict[str, dict[TensorSpec, list[int]]] = {}
    for rank, outline in enumerate(outlines):
        for name, spec in outline.tensors.items():
            ways = ranks.setdefault(name, {})
            if spec not in ways and not all(spec.is_copy_of(other) for other in ways):
                other, others = next(iter(ways.items()))
                raise CheckpointError(
                    "save",
                    f"{name!r} is {other} on rank {others[0]}, {spec} on rank {rank}.",
                    "Give tensors that differ between ranks names of their own, or wrap small ones in PerRank.",
                )
            ways.setdefault(spec, []).append(rank)
    return {name: {way: tuple(holders) for way, holders in ways.items()} for name, ways in ranks.items()}


def _parts(name: str, specs: Mapping[TensorSpec, tuple[int, ...]]) -> dict[Box, tuple[int, ...]]:
    parts: dict[Box, tuple[int, ...]] = {}
    for spec, ranks in specs.items():
        absent = sorted(set(spec.mesh_ranks) - set(ranks))
        if absent:
            raise CheckpointError(
                "save",
                f"{name!r} lies on ranks {absent} too, whose states lack it.",
                "Save it on all ranks of its mesh.",
            )
        whole = Box.whole(spec.shape)
        boxes = spec.boxes() if not spec.is_plain else {whole: ranks} if whole.num_elements else {}
        for box, holders in boxes.items():
            parts[box] = (*parts.get(box, ()), *holders)
    return parts


def _plan_values(outlines: Sequence[Outline], plans: list[RankPlan]) -> None:
    taken: set[str] = set()
    for outline, plan in zip(outlines, plans, strict=True):
        plan.values.extend(name for name in outline.values if name not in taken)
        plan.values.extend(outline.per_rank)
        taken.update(outline.values)


@dataclass(frozen=True)
class Read:
    """Bring the elements in `box` (global) of tensor `name` from `chunk`; they are in the box `wanted`."""

    name: str
    dtype: str
    chunk: Chunk
    box: Box
    wanted: Box


def plan_load(manifest: Manifest, wanted: Mapping[str, Iterable[Box]]) -> list[Read]:
    """Plans the reads that fill the wanted boxes of each tensor, in the order of files and offsets.

    Raises CheckpointCorruptError when the chunks don't cover what is wanted.
    """
    reads: list[Read] = []
    for name, box in ((name, box) for name, boxes in wanted.items() for box in boxes):
        tensor = manifest.tensor_named(name)
        assert tensor is not None
        overlaps = [(chunk, chunk.box.intersection(box)) for chunk in tensor.chunks]
        box_reads = [Read(name, tensor.dtype, chunk, part, box) for chunk, part in overlaps if part is not None]
        num_elements = sum(read.box.num_elements for read in box_reads)
        if num_elements != box.num_elements:
            raise CheckpointCorruptError(
                "load",
                f"{name!r} has chunks for {num_elements} of the {box.num_elements} elements at {box.origin}.",
                "Load another save.",
            )
        reads += box_reads
    return sorted(reads, key=lambda read: (read.chunk.file, read.chunk.offset, read.box))
