"""Outlines: the names and specs of a rank's state, without the values, which ranks compare and plan from. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from disttrain.checkpoint.format.layout import runs_from_plain, runs_of, runs_to_plain
from disttrain.checkpoint.layout import TensorSpec, compact

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
        """Each layout once, and the tensors with the number of theirs."""
        numbers: dict[tuple[Any, ...], int] = {}
        tensors = {}
        for name, spec in self.tensors.items():
            layout = (spec.mesh_ranks, spec.mesh_shape, spec.cuts, spec.num_blocks)
            tensors[name] = [list(spec.shape), spec.dtype, numbers.setdefault(layout, len(numbers))]
        layouts = [
            [runs_to_plain(runs_of(ranks)), *(list(sizes) for sizes in sizes_of_layout)]
            for ranks, *sizes_of_layout in numbers
        ]
        return [layouts, tensors, list(self.values), list(self.per_rank), dict(self.same_as)]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> Outline:
        layouts, tensors, values, per_rank, same_as = plain
        made = [
            (compact([rank for run in runs_from_plain(runs) for rank in run]) if runs else (), *map(tuple, sizes))
            for runs, *sizes in layouts
        ]
        specs = {
            name: TensorSpec(tuple(shape), dtype, *made[number]) for name, (shape, dtype, number) in tensors.items()
        }
        return cls(specs, values, per_rank, same_as)


def is_like_a_value(spec: TensorSpec) -> bool:
    """True if all ranks must have it alike."""
    if not spec.is_plain:
        return False
    shape, dtype = spec.shape, spec.dtype
    return (not shape and dtype in _NUMBERS) or (dtype in _INTEGERS and math.prod(shape) <= _MOST_COMPARED)


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
