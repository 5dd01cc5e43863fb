"""Programs on tensors as values: a list of steps, each a function's name and its arguments, which can be run, cut down
and printed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from disttrain.dtensor import Partial, Placement


@dataclass(frozen=True)
class Ref:
    """What a step has returned; `item` picks one of several results."""

    step: int
    item: int | None = None

    def __repr__(self) -> str:
        return f"v{self.step}" if self.item is None else f"v{self.step}[{self.item}]"


@dataclass(frozen=True)
class Leaf:
    """A new tensor of random values, which depend on nothing but this.

    Values are `scale` times eighths between -2 and 2, so that sums of parts are exact, or whole numbers below `bound`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    seed: int
    bound: int | None = None
    requires_grad: bool = False

    def value(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        if self.bound is not None:
            return torch.randint(0, self.bound, self.shape, generator=generator).to(self.dtype)
        whole = torch.randint(-16, 17, self.shape, generator=generator)
        return (whole / 8 if self.dtype.is_floating_point or self.dtype.is_complex else whole).to(self.dtype)


@dataclass(frozen=True)
class Step:
    """`function` of `args`, in which Refs stand for results of other steps.

    Functions are "leaf", "redistribute", ".method" of the first argument, or a dotted name from `torch`.
    """

    number: int
    function: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    without_grad: bool = False
    rounds: bool = field(default=False, compare=False)
    """Whether the results may rightly differ in their last bits."""

    @property
    def needs(self) -> set[int]:
        """The steps whose results are arguments."""
        return {leaf.step for leaf in leaves_of((self.args, self.kwargs)) if isinstance(leaf, Ref)}


@dataclass(frozen=True)
class Program:
    """Steps on DTensors on a mesh of this shape. `seed` is where it came from."""

    mesh_shape: tuple[int, ...]
    steps: tuple[Step, ...]
    seed: int = 0

    @property
    def world_size(self) -> int:
        return int(torch.Size(self.mesh_shape).numel())


def leaves_of(values: Any) -> Iterator[Any]:
    """What is in a nest of lists, tuples and slices."""
    if isinstance(values, list | tuple):
        for value in values:
            yield from leaves_of(value)
    elif isinstance(values, slice):
        yield from (values.start, values.stop, values.step)
    else:
        yield values


def mapped(change: Callable[[Any], Any], values: Any) -> Any:
    """The nest with its leaves changed; named tuples become tuples."""
    if isinstance(values, list):
        return [mapped(change, value) for value in values]
    if isinstance(values, tuple):
        return tuple(mapped(change, value) for value in values)
    return change(values)


def without(steps: Iterable[Step], numbers: set[int]) -> tuple[Step, ...]:
    """The steps but for some, and for those that need them."""
    gone, kept = set(numbers), []
    for step in steps:
        if step.number in gone or step.needs & gone:
            gone.add(step.number)
        else:
            kept.append(step)
    return tuple(kept)


def source(program: Program) -> str:
    """A Python program of its own that shows what is wrong, to be run from the repository's root."""
    lines = "".join(f"    {_line(step)}\n" for step in program.steps)
    names = ", ".join(f"v{step.number}" for step in program.steps)
    return _PROGRAM.format(lines=lines, names=names, mesh_shape=program.mesh_shape, world_size=program.world_size)


def _line(step: Step) -> str:
    given = [_text(value) for value in step.args] + [f"{name}={_text(value)}" for name, value in step.kwargs]
    if step.function == "leaf":
        call = f"leaf({', '.join(given)})"
    elif step.function == "redistribute":
        call = f"redistribute({', '.join(given)})"
    elif step.function.startswith("."):
        call = f"{given[0]}{step.function}({', '.join(given[1:])})"
    else:
        call = f"{step.function}({', '.join(given)})"
    line = f"v{step.number} = {call}"
    return f"with torch.no_grad(): {line}" if step.without_grad else line


def _text(value: Any) -> str:
    if isinstance(value, Partial):
        return f"Partial({value.reduce_op!r})"
    if isinstance(value, Leaf | Ref | Placement | torch.dtype):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return f'float("{value}")'
    return repr(value)


_PROGRAM = """\
import operator
import torch
from disttrain.dtensor import Partial, Replicate, Shard
from tests.dtensor_programs.alone import backward, gradient, main
from tests.dtensor_programs.program import Leaf


def program(leaf, redistribute):
{lines}    return [{names}]


main(program, {mesh_shape})
"""
