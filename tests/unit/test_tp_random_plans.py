"""Random plans for random stacks of layers keep what these compute, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from disttrain.dtensor import DTensor, Placement, Replicate, Shard
from disttrain.mesh import DeviceMesh
from disttrain.tp import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from tests.cases.tensor_parallel import Attention, GatedMLP, same_as_alone

WHOLE = Replicate()


@dataclass(frozen=True)
class Activations:
    """What goes from one part of the stack to the next, and how it lies."""

    shape: tuple[int, int, int]
    placement: Placement
    is_dtensor: bool


@dataclass(frozen=True)
class Part:
    """A module by how it is made, the styles of what is in it, and what it gives."""

    kind: str
    arguments: tuple[Any, ...]
    styles: dict[str, Any]
    output: Activations

    def make(self) -> nn.Module:
        return KINDS[self.kind](*self.arguments)


# Of a row of one value norms have 0, and the gradient of that at torch's epsilon, squared by the next norm, is noise.
EPSILON = 0.1

KINDS: dict[str, Callable[..., nn.Module]] = {
    "mlp": GatedMLP,
    "attention": Attention,
    "linear": nn.Linear,
    "layer norm": partial(nn.LayerNorm, eps=EPSILON),
    "rms norm": partial(nn.RMSNorm, eps=EPSILON),
    "dropout": nn.Dropout,
    "identity": nn.Identity,
}


def is_even(shape: tuple[int, ...], placement: Placement, num_ranks: int) -> bool:
    return not isinstance(placement, Shard) or shape[placement.dim] % num_ranks == 0


def placements() -> st.SearchStrategy[Placement]:
    return st.sampled_from([WHOLE, Shard(0), Shard(1), Shard(-1)])


@st.composite
def activations(draw: st.DrawFn, shape: tuple[int, int, int], num_ranks: int) -> Activations:
    """Plain parts don't say what they are parts of: only even cuts are plain."""
    placement = draw(placements())
    return Activations(shape, placement, not is_even(shape, placement, num_ranks) or draw(st.booleans()))


@st.composite
def parts(draw: st.DrawFn, come: Activations, num_ranks: int) -> Part:
    kinds = ["mlp", "column", "row", "identity"]
    width = come.shape[-1]
    if width % (2 * num_ranks) == 0:
        kinds.append("attention")
    if come.placement in (Shard(0), Shard(1)):
        kinds += ["layer norm", "rms norm", "dropout"]
    kind = draw(st.sampled_from(kinds))
    return draw({"column": linears, "row": linears}.get(kind, OTHERS.get(kind, norms))(come, num_ranks, kind))


@st.composite
def linears(draw: st.DrawFn, come: Activations, num_ranks: int, kind: str) -> Part:
    *rows, width = come.shape
    num_outputs, bias = draw(st.integers(1, 8)), draw(st.booleans())
    go = draw(activations((*rows, num_outputs), num_ranks))
    style = ColwiseParallel if kind == "column" else RowwiseParallel
    styles = style(
        input_layouts=come.placement, output_layouts=go.placement, use_local_output=not go.is_dtensor,
        overlap=draw(st.sampled_from([None, False, True])),
    )  # fmt: skip
    return Part("linear", (width, num_outputs, bias), {"": styles}, go)


@st.composite
def pairs(draw: st.DrawFn, come: Activations, num_ranks: int, kind: str) -> Part:
    """An MLP or an attention: layers by columns, then one by rows."""
    width = come.shape[-1]
    head_dim = None
    if kind == "attention":
        head_dim = draw(st.sampled_from([size for size in (1, 2) if width // size % num_ranks == 0]))
        num_heads = width // head_dim
        fits = [
            heads
            for heads in range(1, num_heads + 1)
            if num_heads % heads == 0 and (heads % num_ranks == 0 or num_ranks % heads == 0)
        ]
        arguments: tuple[Any, ...] = (width, num_heads, draw(st.sampled_from(fits)), draw(st.booleans()))
        columns, row = ("query", "key", "value"), "out"
    else:
        arguments = (width, draw(st.integers(1, 9)), draw(st.booleans()))
        columns, row = ("gate", "up"), "down"
    go = draw(activations(come.shape, num_ranks))
    overlap = draw(st.sampled_from([None, False, True]))
    is_shared = draw(st.booleans())
    gives_dtensors = kind == "mlp" and draw(st.booleans())
    styles: dict[str, Any] = {
        name: ColwiseParallel(
            input_layouts=WHOLE if is_shared else come.placement,
            use_local_output=not gives_dtensors, head_dim=head_dim, overlap=overlap,
        )
        for name in columns
    }  # fmt: skip
    styles[row] = RowwiseParallel(output_layouts=go.placement, use_local_output=not go.is_dtensor, overlap=overlap)
    if is_shared:
        styles[""] = PrepareModuleInput(input_layouts=come.placement, desired_input_layouts=WHOLE)
    return Part(kind, arguments, styles, go)


@st.composite
def norms(draw: st.DrawFn, come: Activations, num_ranks: int, kind: str) -> Part:
    assert isinstance(come.placement, Shard)
    is_plain = not come.is_dtensor and draw(st.booleans())
    style = SequenceParallel(sequence_dim=come.placement.dim, use_local_output=is_plain)
    arguments = (0.0,) if kind == "dropout" else (come.shape[-1],)
    return Part(kind, arguments, {"": style}, Activations(come.shape, come.placement, not is_plain))


@st.composite
def identities(draw: st.DrawFn, come: Activations, num_ranks: int, kind: str) -> Part:
    """What only moves."""
    go = draw(activations(come.shape, num_ranks))
    first = {"input_layouts": come.placement, "desired_input_layouts": go.placement}
    last = {"output_layouts": come.placement, "desired_output_layouts": go.placement}
    where = draw(st.sampled_from(["before", "after", "both"]))
    style: Any
    if where == "before":
        style = PrepareModuleInput(**first, use_local_output=not go.is_dtensor)
    elif where == "after":
        style = PrepareModuleOutput(**last, use_local_output=not go.is_dtensor)
    else:
        style = PrepareModuleInputOutput(
            input_layouts=come.placement, desired_input_layouts=WHOLE, use_local_input=draw(st.booleans()),
            output_layouts=WHOLE, desired_output_layouts=go.placement, use_local_output=not go.is_dtensor,
        )  # fmt: skip
    return Part("identity", (), {"": style}, go)


OTHERS: dict[str, Any] = {"mlp": pairs, "attention": pairs, "identity": identities}


@dataclass(frozen=True)
class Case:
    num_ranks: int
    come: Activations
    parts: tuple[Part, ...]

    def plan(self) -> dict[str, Any]:
        return {
            f"{place}.{name}".rstrip("."): style
            for place, part in enumerate(self.parts)
            for name, style in part.styles.items()
        }

    def make(self) -> nn.Module:
        return nn.Sequential(*[part.make() for part in self.parts])

    def enter(self, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        if self.come.placement == WHOLE and not self.come.is_dtensor:
            return x
        given = DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[self.come.placement])
        return given if self.come.is_dtensor else given.to_local()

    def leave(self, y: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        go = self.parts[-1].output
        assert isinstance(y, DTensor) == go.is_dtensor
        if go.placement == WHOLE and not go.is_dtensor:
            return y
        return (y if go.is_dtensor else DTensor.from_local(y, mesh, [go.placement])).full_tensor()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_ranks = draw(st.integers(1, 4))
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.sampled_from([1, 3, 4, 6, 8, 12])))
    come = first = draw(activations(shape, num_ranks))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        found.append(draw(parts(come, num_ranks)))
        come = found[-1].output
    return Case(num_ranks, first, tuple(found))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@settings(max_examples=30, deadline=None)
@given(cases())
def test_random_plans_keep_the_function(case: Case) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(case.come.shape, generator=generator)
    same_as_alone(case.make, case.plan, x, case.num_ranks, enter=case.enter, leave=case.leave)
