"""Random programs of views, writes and reads in any order, on a DTensor and on a plain tensor, whose values are right.

A program is drawn by running it on plain tensors: what torch refuses is left out. It is then a list of steps that says
nothing of tensors, so every rank runs it alike. Tensor 0 is the base, and each view step adds one more.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import disttrain
from disttrain.dtensor import Partial, Placement, Replicate, Shard
from disttrain.testing import run_threads
from tests.cases.dtensors import laid
from tests.fuzz.shrinking import shrink
from tests.view_programs.steps import VIEWS, WRITES, Draw

MESHES = [(1,), (2,), (3,), (4,), (2, 2), (1, 1), (1, 2), (1, 3), (2, 1), (3, 1), (1, 2, 2), (2, 1, 2)]
SHAPES = [(7, 6), (4, 5), (6, 4), (1, 6), (5, 1), (3,), (8,), (2, 3, 4), (4, 1, 3), (5, 2, 2)]
DTYPES = [torch.float64, torch.float64, torch.float32, torch.int64, torch.complex128]
REFUSED = ["places are counted beyond a tensor", "cannot keep its memory", "has elements that share memory"]
"""The answers to as_strided of what is not contiguous, to `squeeze_` of a dim that is cut, and to a write to what is
partial and overlaps itself."""
MODES = ["grad", "no_grad", "inference", "inference views"]


@dataclass(frozen=True)
class Step:
    """`kind` is view, write or read; of tensor `place`, and of tensor `other` where it is a write."""

    kind: str
    place: int
    name: str = ""
    arguments: tuple[Any, ...] = ()
    other: int = 0

    def run(self, tensors: list[torch.Tensor]) -> torch.Tensor | None:
        """Returns what was read."""
        tensor = tensors[self.place]
        if self.kind == "read":
            return tensor.detach() * 1 if self.name == "used" else tensor.detach()
        if self.kind == "view":
            tensors.append(VIEWS[self.name][0](tensor, *self.arguments))
        else:
            WRITES[self.name][0](tensor, tensors[self.other], *self.arguments)
        return None


@dataclass
class Program:
    """What a seed stands for."""

    seed: int
    mesh_shape: tuple[int, ...]
    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    dtype: torch.dtype
    mode: str
    steps: list[Step] = field(default_factory=list)

    def base(self) -> torch.Tensor:
        return torch.arange(1, 1 + math.prod(self.shape)).reshape(self.shape).to(self.dtype)

    def run(self, leaf: torch.Tensor, compare: Callable[[str, torch.Tensor], None]) -> None:
        """The steps on a copy of `leaf`; all that is seen is handed to `compare`."""
        with ExitStack() as stack:
            if self.mode == "no_grad":
                stack.enter_context(torch.no_grad())
            if self.mode == "inference":
                stack.enter_context(torch.inference_mode())
            tensors = [leaf * 1]
            if self.mode == "inference views":
                stack.enter_context(torch.inference_mode())
            for number, step in enumerate(self.steps):
                seen = step.run(tensors)
                if seen is not None:
                    compare(f"read in step {number}", seen)
            for place, tensor in enumerate(tensors):
                compare(f"tensor {place} at the end", tensor.detach())
            if tensors[0].requires_grad:
                outputs = [tensor for tensor in tensors if tensor.requires_grad]
                total = sum((place + 2) * (tensor * tensor).sum() for place, tensor in enumerate(outputs))
                torch.autograd.backward([total.real if total.is_complex() else total])  # type: ignore[union-attr]
        if leaf.grad is not None:
            compare("gradient", leaf.grad)

    def __str__(self) -> str:
        where = f"{self.dtype} {self.shape} as {list(self.placements)} on {self.mesh_shape}, {self.mode}"
        return "\n".join(
            [f"seed {self.seed}: {where}", *[f"  {number}: {step}" for number, step in enumerate(self.steps)]]
        )


def program_of(seed: int, num_steps: int = 10) -> Program:
    draw = random.Random(seed)
    mesh_shape, shape = draw.choice(MESHES), draw.choice(SHAPES)
    dtype = draw.choice(DTYPES)
    partial = Partial(draw.choice(["sum", "sum", "avg"] if dtype.is_complex else ["sum", "avg", "min", "max"]))
    kinds: list[Placement] = [*(Shard(dim) for dim in range(len(shape)))] * 3 + [Replicate(), partial]
    placements = tuple(draw.choice(kinds) for _ in mesh_shape)
    program = Program(seed, mesh_shape, shape, placements, dtype, draw.choice(MODES))
    while len(program.steps) < num_steps:
        step = _step(draw, program)
        if step is None:
            continue
        program.steps.append(step)
        if not _is_accepted(program):
            program.steps.pop()
    return program


def _step(draw: Draw, program: Program) -> Step | None:
    tensors = _replayed(program)
    kind = draw.choices(["view", "write", "read"], [5, 3, 3])[0]
    # What was made last is what is most often viewed again.
    place = draw.choice([len(tensors) - 1, draw.randrange(len(tensors))])
    tensor = tensors[place]
    try:
        if kind == "read":
            return Step("read", place, draw.choice(["used", "whole"]))
        if kind == "view":
            name = draw.choice(list(VIEWS))
            if program.mode == "grad" and (name == "redistribute" or name.endswith("_")):
                # To autograd the one's result is another tensor; of the others torch forgets the shape.
                return None
            if name == "view dtype" and Partial("avg") in program.placements:
                return None  # a small whole number is, as the bits of a float, one that an average rounds to zero
            return Step("view", place, name, VIEWS[name][1](draw, tensor))
        name = draw.choice(list(WRITES))
        alike = [other for other, one in enumerate(tensors) if one.shape == tensor.shape and one.dtype == tensor.dtype]
        return Step("write", place, name, WRITES[name][1](draw, tensor), draw.choice(alike))
    except (IndexError, ValueError):
        return None  # no such dim


def _replayed(program: Program) -> list[torch.Tensor]:
    tensors = [program.base()]
    with torch.no_grad():
        for step in program.steps:
            if step.kind == "view":
                step.run(tensors)
    return tensors


def _is_accepted(program: Program) -> bool:
    """Whether torch runs the program on plain tensors, and says what comes of it. A zero that is the sum of parts has
    lost its sign, which its bits show."""
    step, is_told, is_sum = program.steps[-1], True, Partial("sum") in program.placements

    def check(_: str, value: torch.Tensor) -> None:
        nonlocal is_told
        real = torch.view_as_real(value) if value.is_complex() else value
        is_told &= bool(real.abs().lt(1e9).all()) and not (is_sum and bool((real.signbit() & real.eq(0)).any()))

    try:
        tensors = _replayed(program)
        if step.kind == "write" and any(_overlaps(tensors[place]) for place in (step.place, step.other)):
            return False
        if tensors[-1].untyped_storage().data_ptr() != tensors[0].untyped_storage().data_ptr():
            return False  # a reshape that copies
        program.run(_leaf(program, program.base()), check)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return False
    return is_told


def _overlaps(tensor: torch.Tensor) -> bool:
    places = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = places[..., None] + torch.arange(size) * stride
    return places.unique().numel() != places.numel()


def _leaf(program: Program, tensor: torch.Tensor) -> torch.Tensor:
    has_gradient = program.mode == "grad" and program.dtype != torch.int64
    return tensor.detach().requires_grad_() if has_gradient else tensor


def differences(program: Program) -> list[str]:
    """Where the program on DTensors sees other values than on plain tensors; called on every rank."""
    expected: list[tuple[str, torch.Tensor]] = []
    program.run(_leaf(program, program.base()), lambda what, value: expected.append((what, value.clone())))
    found: list[str] = []
    wanted = iter(expected)

    def compare(what: str, value: torch.Tensor) -> None:
        name, right = next(wanted)
        assert name == what
        assert isinstance(value, disttrain.dtensor.DTensor)
        own = value.full_tensor()
        if own.shape != right.shape or own.dtype != right.dtype:
            found.append(f"{what}: {own.dtype} {tuple(own.shape)} is not {right.dtype} {tuple(right.shape)}")
        elif not torch.allclose(own, right, equal_nan=True):
            found.append(f"{what}: {own.flatten().tolist()} is not {right.flatten().tolist()}")

    mesh = disttrain.init_device_mesh("cpu", program.mesh_shape)
    program.run(_leaf(program, laid(program.base(), mesh, program.placements)), compare)
    return found


def faults_of(program: Program) -> list[str]:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*has no sharding rule")
            results = run_threads(math.prod(program.mesh_shape), lambda: differences(program))
    except Exception as error:  # noqa: BLE001  # whatever it is, it is a fault
        is_refused = any(reason in str(error) for reason in REFUSED)
        return [] if is_refused else [f"{type(error).__name__}: {error}"]
    return results[0] or [f"only on rank {rank}: {one}" for rank, result in enumerate(results) for one in result]


def shrunk(program: Program) -> Program:
    """The same with as few steps as still go wrong."""
    return shrink(program, lambda smaller: _is_taken(smaller) and bool(faults_of(smaller)), _smaller)


def _smaller(program: Program) -> Iterator[Program]:
    for place in reversed(range(len(program.steps))):
        steps = _without(program.steps, place)
        if steps is not None:
            yield replace(program, steps=steps)


def _is_taken(program: Program) -> bool:
    """Whether torch takes every step of it."""
    return all(_is_accepted(replace(program, steps=program.steps[: end + 1])) for end in range(len(program.steps)))


def _without(steps: Sequence[Step], place: int) -> list[Step] | None:
    """The steps but for one; None where others need its view."""
    if steps[place].kind != "view":
        return [*steps[:place], *steps[place + 1 :]]
    gone = 1 + sum(step.kind == "view" for step in steps[:place])
    left = []
    for number, step in enumerate(steps):
        if number == place:
            continue
        if gone in (step.place, step.other):
            return None
        moved = [one - (one > gone) for one in (step.place, step.other)]
        left.append(Step(step.kind, moved[0], step.name, step.arguments, moved[1]))
    return left
