"""Plans of saves and loads: which rank writes which part of which tensor, and which part of which file goes where.
Pure.

A save's plan is a function of what all ranks hold, so that each rank can make its own part by itself: nothing here goes
through all ranks for a tensor. A load's plan is a function of the boxes that one rank needs, and the manifest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

from disttrain.checkpoint.dealing import Dealt, Hand, deal
from disttrain.checkpoint.format.box import Box
from disttrain.checkpoint.format.dtypes import dtype_named
from disttrain.checkpoint.format.layout import Layout, Runs, runs_of
from disttrain.checkpoint.format.manifest import Chunk, Manifest, SavedTensor
from disttrain.checkpoint.format.rules import have_overlap
from disttrain.checkpoint.format.spread import Spread
from disttrain.checkpoint.layout import TensorSpec
from disttrain.checkpoint.outline import Outline
from disttrain.errors import CheckpointCorruptError, CheckpointError

SPLIT_BYTES = 4 << 20
"""A part that several ranks hold is split among them when it is larger."""


@dataclass(frozen=True)
class RankPlan:
    """The part of a save that one rank writes: parts of tensors by name, and values by name. `listed`: the tensors
    among them that no mesh cuts, whose chunks the manifest lists."""

    parts: list[tuple[str, Box]] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    listed: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Placed:
    """A tensor's layout, and how its parts are split and dealt to those that hold them."""

    spec: TensorSpec
    layout: Layout
    dealt: Dealt
    max_elements: int

    @property
    def is_cut(self) -> bool:
        return self.layout.num_parts > 1


class SavePlans(Sequence[RankPlan]):
    """The plan of each rank, made when it is asked for."""

    def __init__(self, outlines: Sequence[Outline], differing: Collection[str] = ()) -> None:
        self._outlines = outlines
        ranks_of: dict[int, list[int]] = {}
        for rank, outline in enumerate(outlines):
            ranks_of.setdefault(id(outline), []).append(rank)
        self._alike = [(ranks, outlines[ranks[0]]) for ranks in ranks_of.values()]
        """Each different outline, with the ranks that have it."""
        _check_kinds([outline for _, outline in self._alike])
        self._value_writers = {name: ranks[0] for ranks, outline in reversed(self._alike) for name in outline.values}
        self._placed = _deal_all(_Merged(self._alike).layouts(), differing)

    def __len__(self) -> int:
        return len(self._outlines)

    @overload
    def __getitem__(self, rank: int) -> RankPlan: ...
    @overload
    def __getitem__(self, rank: slice) -> list[RankPlan]: ...
    def __getitem__(self, rank: int | slice) -> RankPlan | list[RankPlan]:
        if isinstance(rank, slice):
            return [self[each] for each in range(len(self))[rank]]
        outline = self._outlines[rank]
        plan = RankPlan(values=[name for name in outline.values if self._value_writers[name] == rank])
        plan.values.extend(outline.per_rank)
        locations: dict[int, tuple[tuple[int, ...], int] | None] = {}
        for name in sorted(outline.tensors):
            placed = self._placed[name]
            key = id(placed.layout)
            if key not in locations:
                locations[key] = placed.layout.find(rank)
            location = locations[key]
            boxes = [] if location is None else _written(placed, *location)
            plan.parts.extend((name, box) for box in boxes)
            if boxes and not placed.is_cut:
                plan.listed.add(name)
        return plan

    def owners(self) -> dict[str, Runs]:
        """The ranks that have each value per rank."""
        ranks: dict[str, list[int]] = {}
        for of_outline, outline in self._alike:
            for name in outline.per_rank:
                ranks.setdefault(name, []).extend(of_outline)
        return {name: runs_of(sorted(of_name)) for name, of_name in sorted(ranks.items())}

    def spreads(self) -> dict[str, Spread]:
        """Where the chunks of each tensor are that a mesh cuts."""
        return {name: Spread(placed.layout, *placed.dealt) for name, placed in self._placed.items() if placed.is_cut}


def plan_save(outlines: Sequence[Outline], differing: Collection[str] = ()) -> SavePlans:
    """Plans what each rank writes, given what each has. Every element of every tensor is written by exactly one rank.

    A part that only one rank holds is written by that rank. Tensors whose parts several ranks hold are dealt to them,
    largest first, see `deal`. A plain value is written by the first rank that has it, and so is each tensor that is
    `differing` among ranks. Raises CheckpointError if ranks have different kinds of leaves under one name.
    """
    return SavePlans(outlines, differing)


def _written(placed: _Placed, coordinate: tuple[int, ...], position: int) -> list[Box]:
    """The boxes that the holder at `position` of the parts at `coordinate` writes."""
    boxes = placed.layout.boxes_at(placed.spec.shape, coordinate)
    num_holders = placed.layout.num_holders
    if num_holders == 1:
        return boxes
    turn = (position - placed.dealt.first) % num_holders
    if turn >= placed.dealt.num_writers:
        return []
    pieces = [piece for box in boxes for piece in box.split(placed.max_elements)]
    return pieces[turn :: placed.dealt.num_writers]


def _deal_all(layouts: Mapping[str, tuple[TensorSpec, Layout]], differing: Collection[str]) -> dict[str, _Placed]:
    """Deals tensors among ranks that are the holders of parts of all of them."""
    groups: dict[tuple[object, ...], list[Hand]] = {}
    load_bytes: dict[int, int] = {}
    group_of: dict[int, list[Hand]] = {}
    max_elements: dict[str, int] = {}
    for name in sorted(layouts):
        spec, layout = layouts[name]
        if layout.num_holders == 1 or name in differing:
            if layout.num_parts == 1:
                writer = layout.holder((0,) * len(layout.mesh_shape), 0)
                num_bytes = math.prod(spec.shape) * dtype_named(spec.dtype).itemsize
                load_bytes[writer] = load_bytes.get(writer, 0) + num_bytes
            continue
        if id(layout) not in group_of:
            axes = tuple(cut is None for cut in layout.cuts)
            group_of[id(layout)] = groups.setdefault((layout.meshes, layout.mesh_shape, axes), [])
        boxes = layout.boxes_at(spec.shape, (0,) * len(layout.mesh_shape))
        if not boxes:
            continue
        item_size = dtype_named(spec.dtype).itemsize
        largest = max(box.num_elements for box in boxes)
        max_elements[name] = _split_elements(largest, item_size, layout.num_holders)
        num_pieces = sum(1 for box in boxes for _ in box.split(max_elements[name]))
        piece_bytes = -(-sum(box.num_elements for box in boxes) * item_size // num_pieces)
        group_of[id(layout)].append(Hand(name, piece_bytes, num_pieces))
    dealt: dict[str, Dealt] = {}
    for start, hands in enumerate(filter(None, groups.values())):
        layout = layouts[hands[0].name][1]
        loads = {}
        for rank, num_bytes in load_bytes.items() if layout.num_parts == 1 else ():
            if (location := layout.find(rank)) is not None:
                loads[location[1]] = num_bytes
        dealt |= deal(hands, layout.num_holders, start % layout.num_holders, loads)
    return {
        name: _Placed(spec, layout, dealt.get(name, Dealt(0, 1)), max_elements.get(name, math.prod(spec.shape)))
        for name, (spec, layout) in layouts.items()
    }


def _split_elements(num_elements: int, item_size: int, num_holders: int) -> int:
    """The most elements of each piece of a shared part."""
    if num_elements * item_size <= SPLIT_BYTES:
        return num_elements
    return max(SPLIT_BYTES // item_size, -(-num_elements // num_holders))


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


class _Merged:
    """Different outlines, each with its ranks, put together. Layouts are made, and meshes are checked, once."""

    def __init__(self, alike: Sequence[tuple[Sequence[int], Outline]]) -> None:
        self._outlines = [outline for _, outline in alike]
        self._ranks = [ranks for ranks, _ in alike]
        self._layouts: dict[tuple[object, ...], Layout] = {}
        self._holders: dict[tuple[int, ...], frozenset[int]] = {}
        self._absent: dict[tuple[object, ...], list[int]] = {}
        self._are_disjoint: dict[tuple[object, ...], bool] = {}

    def layouts(self) -> dict[str, tuple[TensorSpec, Layout]]:
        """Each tensor's spec, of which the mesh may be one of several, and its layout on all ranks that have it."""
        ways: dict[str, dict[TensorSpec, list[int]]] = {}
        for number, outline in enumerate(self._outlines):
            for name, spec in outline.tensors.items():
                ways.setdefault(name, {}).setdefault(spec, []).append(number)
        return {name: (next(iter(of_name)), self._layout(name, of_name)) for name, of_name in ways.items()}

    def _layout(self, name: str, ways: Mapping[TensorSpec, list[int]]) -> Layout:
        self._check(name, ways)
        (first, numbers), *_ = ways.items()
        if first.is_plain:
            return self._made((tuple(numbers),), lambda: Layout.replicated(sorted(self._having(numbers))))
        meshes = tuple(spec.mesh_ranks for spec in ways)
        cuts = first.axis_cuts
        if all(cut is None or size == 1 for cut, size in zip(cuts, first.mesh_shape, strict=True)):
            return self._made((meshes,), lambda: Layout.replicated([rank for mesh in meshes for rank in mesh]))
        return self._made(
            (meshes, first.mesh_shape, cuts), lambda: Layout(tuple(map(runs_of, meshes)), first.mesh_shape, cuts)
        )

    def _made(self, key: tuple[object, ...], make: Callable[[], Layout]) -> Layout:
        return self._layouts.get(key) or self._layouts.setdefault(key, make())

    def _having(self, numbers: Sequence[int]) -> frozenset[int]:
        """The ranks that have one of these outlines."""
        key = tuple(numbers)
        if key not in self._holders:
            self._holders[key] = frozenset(rank for number in numbers for rank in self._ranks[number])
        return self._holders[key]

    def _check(self, name: str, ways: Mapping[TensorSpec, list[int]]) -> None:
        (first, first_numbers), *others = ways.items()
        meshes = tuple(spec.mesh_ranks for spec in ways)
        for spec, numbers in others:
            if not spec.lies_as(first) or not self._is_disjoint(meshes):
                raise CheckpointError(
                    "save",
                    f"{name!r} is {first} on rank {self._ranks[first_numbers[0]][0]}, "
                    f"{spec} on rank {self._ranks[numbers[0]][0]}.",
                    "Give tensors that differ between ranks names of their own, or wrap small ones in PerRank.",
                )
        for spec, numbers in ways.items():
            key = (spec.mesh_ranks, *numbers)
            if key not in self._absent:
                having = self._having(numbers)
                self._absent[key] = sorted(rank for rank in spec.mesh_ranks if rank not in having)
            if self._absent[key]:
                raise CheckpointError(
                    "save",
                    f"{name!r} lies on ranks {self._absent[key]} too, whose states lack it.",
                    "Save it on all ranks of its mesh.",
                )

    def _is_disjoint(self, meshes: tuple[Sequence[int], ...]) -> bool:
        if meshes not in self._are_disjoint:
            self._are_disjoint[meshes] = len(set().union(*meshes)) == sum(map(len, meshes))
        return self._are_disjoint[meshes]


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
        overlaps = [(chunk, chunk.box.intersection(box)) for chunk in tensor.chunks_near(box)]
        box_reads = [Read(name, tensor.dtype, chunk, part, box) for chunk, part in overlaps if part is not None]
        num_elements = sum(read.box.num_elements for read in box_reads)
        if num_elements != box.num_elements:
            raise CheckpointCorruptError(
                "load",
                f"{name!r} has chunks for {num_elements} of the {box.num_elements} elements at {box.origin}.",
                "Load another save.",
            )
        # Chunks that are listed are compared with each other when the manifest is read.
        if not isinstance(tensor, SavedTensor) and have_overlap([read.box for read in box_reads]):
            raise CheckpointCorruptError("load", f"{name!r} has chunks that lie over each other.", "Load another save.")
        reads += box_reads
    return sorted(reads, key=lambda read: (read.chunk.file, read.chunk.offset, read.box))
