"""Sharding rules: single-axis signatures of one operator call, and how its parts are computed.

A rule looks at a call and lists what may lie along *one* mesh axis: a placement for each tensor operand and the ones
that the results then have. `propagate` picks, axis by axis, the signature that costs least. So a rule never sees the
mesh, and the cost of choosing grows with axes times signatures.

Where each rank's part of the result is not simply the operator of its parts (sizes among the arguments, places counted
from a part's start), the rule also says how to compute it: `localize`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from disttrain.dtensor._torch import OpFacts, OpOverload
from disttrain.dtensor.spec.layout import Layout, Spec
from disttrain.dtensor.spec.placement import Placement, Replicate
from disttrain.dtensor.views.view_copy import Fetch


@dataclass(frozen=True)
class OpCall:
    """One operator call, without values.

    `operands` are the tensor operands in the order of the arguments, those in lists too: the spec of a DTensor, None
    for a plain scalar tensor. `outputs` are the results for the global shapes, on the meta device.
    """

    op: OpOverload
    facts: OpFacts
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    operands: tuple[Spec | None, ...]
    outputs: tuple[torch.Tensor, ...]

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The global shape of the first result."""
        return tuple(self.outputs[0].shape)

    @property
    def operand(self) -> Spec:
        """The first operand, where a rule knows that it is a DTensor."""
        spec = self.operands[0]
        assert spec is not None
        return spec

    def argument(self, name: str, default: Any = None) -> Any:
        """The argument called `name`, however it was given; `default` where it was not, and where it is None."""
        if name in self.keywords:
            value = self.keywords[name]
        else:
            position = self.facts.arguments.index(name) if name in self.facts.arguments else len(self.arguments)
            value = self.arguments[position] if position < len(self.arguments) else None
        return default if value is None else value


@dataclass(frozen=True)
class Signature:
    """Along one axis: what each operand must be, and what each result is then.

    `for_one_rank`: this holds along axes of one rank alone, where what is cut is whole all the same. `only_axis`: it
    holds along that axis of the mesh alone, where what is cut along several cannot be computed by parts.
    """

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    for_one_rank: bool = False
    only_axis: int | None = None

    def holds_along(self, axis: int, axis_size: int) -> bool:
        return (axis_size == 1 or not self.for_one_rank) and self.only_axis in (None, axis)

    @classmethod
    def of(cls, operands: Sequence[Placement], *results: Placement) -> Signature:
        return cls(tuple(operands), results)


@dataclass(frozen=True)
class Propagation:
    """Layouts for the operands (None for plain scalars) and the results of one operator call."""

    operands: tuple[Layout | None, ...]
    results: tuple[Layout, ...]


def result_specs(call: OpCall, propagation: Propagation) -> list[Spec]:
    """The specs of the results; their local shapes are those of this rank's parts."""
    return [
        Spec(layout, tuple(output.shape), tuple(output.stride()), output.dtype)
        for output, layout in zip(call.outputs, propagation.results, strict=True)
    ]


Compute = Callable[..., Any]
"""Takes the call's arguments with this rank's parts in place of the DTensors; returns its parts of the results."""

Localize = Callable[[OpCall, Propagation], Compute]


def never(_: OpCall) -> bool:
    """False for all calls."""
    return False


def always(_: OpCall) -> bool:
    """True for all calls."""
    return True


@dataclass(frozen=True)
class Rule:
    """The sharding rule of an operator. `localize` None: the operator itself, on the parts.

    `shards_unevenly` False: operands are never left in pieces of different sizes (some of them empty, perhaps).
    `takes_blocks` False: where a dim is cut, each rank must have consecutive elements of it.
    `reads_numbers` True: the signatures depend on the values of floats among the arguments.
    `reads_numbers_of_partial` True: so they do where an operand is partial.
    `goes_by_layout` True: which signatures there are, and whether `localize` returns the operator itself, depends on
    sizes only through which of them are one, as long as cuts are even.
    `computes_by_layout`, where it goes by layout: whether what `localize` returns for such a call does so as well.
    `joint`, where axes that cut one dim must be looked at together: decides in place of `signatures`, unless it
    returns None. `fetch`, for operators with one operand: how its part gets to where the operator can be computed,
    where that is more than a redistribution; None for nothing. `outputs`: the results for the global shapes, where a
    device returns others than the meta device does.
    """

    signatures: Callable[[OpCall], Sequence[Signature]]
    localize: Localize | None = None
    shards_unevenly: bool = True
    takes_blocks: bool = True
    reads_numbers: bool = False
    reads_numbers_of_partial: bool = False
    goes_by_layout: bool = False
    computes_by_layout: Callable[[OpCall], bool] = never
    joint: Callable[[OpCall], Propagation | None] | None = None
    fetch: Callable[[OpCall, Propagation], Fetch | None] | None = None
    outputs: Callable[[OpCall], tuple[torch.Tensor, ...]] | None = None

    def depends_on_numbers(self, operands: Sequence[Spec | None]) -> bool:
        """Whether the signatures for these operands depend on the values of floats among the arguments."""
        is_partial = self.reads_numbers_of_partial and any(spec and spec.layout.has_partial for spec in operands)
        return self.reads_numbers or is_partial


def broadcast_shape(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape of shapes that fit, broadcast. Of symbols torch is asked, whose function loads sympy."""
    if any(type(size) is not int for shape in shapes for size in shape):
        return tuple(torch.broadcast_shapes(*shapes))
    num_dims = max(map(len, shapes), default=0)
    columns = zip(*[(1,) * (num_dims - len(shape)) + tuple(shape) for shape in shapes], strict=True)
    return tuple([next((size for size in sizes if size != 1), 1) for sizes in columns])


def all_replicated(call: OpCall) -> Signature:
    """The signature that every deterministic operator has."""
    return Signature((Replicate(),) * len(call.operands), (Replicate(),) * len(call.outputs))
