"""Makes a program that fails small: fewer steps, fewer axes, simpler leaves, as long as it fails in the same way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from disttrain.dtensor import Placement, Replicate
from tests.dtensor_programs.generate import first_refused
from tests.dtensor_programs.program import Leaf, Program, Ref, Step, mapped, without
from tests.dtensor_programs.run import Verdict, run_program
from tests.fuzz.shrinking import shrink, without_some


def shrunk(verdict: Verdict) -> Verdict:
    """The smallest program found that has a fault of the same kind."""

    def fails_alike(program: Program) -> bool:
        return first_refused(program.steps) is None and run_program(program).fault == verdict.fault

    return run_program(shrink(verdict.program, fails_alike, _smaller, limit_s=300.0))


def _smaller(program: Program) -> Iterator[Program]:
    steps = program.steps
    for some in without_some(steps):
        if kept := without(steps, {step.number for step in steps if step not in some}):
            yield replace(program, steps=kept)
    for step in steps:
        for other in _bypassed(steps, step):
            yield replace(program, steps=other)
    for axis in range(len(program.mesh_shape)):
        if len(program.mesh_shape) > 1:
            yield _without_axis(program, axis)
        for size in range(1, program.mesh_shape[axis]):
            shape = (*program.mesh_shape[:axis], size, *program.mesh_shape[axis + 1 :])
            yield replace(program, mesh_shape=shape)
    for place, step in enumerate(steps):
        for simpler in _simpler(step):
            yield replace(program, steps=(*steps[:place], simpler, *steps[place + 1 :]))


def _bypassed(steps: tuple[Step, ...], step: Step) -> Iterator[tuple[Step, ...]]:
    """Whoever needs the step's result gets its first operand."""
    first = next((leaf for leaf in step.args if isinstance(leaf, Ref)), None)
    if first is None:
        return

    def swap(leaf: object) -> object:
        return first if isinstance(leaf, Ref) and leaf.step == step.number else leaf

    yield tuple(
        replace(other, args=mapped(swap, other.args), kwargs=mapped(swap, other.kwargs))
        for other in steps
        if other is not step
    )


def _without_axis(program: Program, axis: int) -> Program:
    shape = program.mesh_shape[:axis] + program.mesh_shape[axis + 1 :]

    def reduced(step: Step) -> Step:
        if step.function not in ("leaf", "redistribute"):
            return step
        first, placements = step.args
        return replace(step, args=(first, placements[:axis] + placements[axis + 1 :]))

    return replace(program, mesh_shape=shape, steps=tuple(map(reduced, program.steps)))


def _simpler(step: Step) -> Iterator[Step]:
    if step.without_grad:
        yield replace(step, without_grad=False)
    if step.function not in ("leaf", "redistribute"):
        return
    first, placements = step.args
    for axis, placement in enumerate(placements):
        if placement != Replicate():
            yield replace(step, args=(first, _changed(placements, axis, Replicate())))
    if isinstance(first, Leaf):
        if first.requires_grad:
            yield replace(step, args=(replace(first, requires_grad=False), placements))
        for dim, size in enumerate(first.shape):
            for smaller in (1, 2, 3):
                if smaller < size:
                    shape = (*first.shape[:dim], smaller, *first.shape[dim + 1 :])
                    yield replace(step, args=(replace(first, shape=shape), placements))


def _changed(placements: tuple[Placement, ...], axis: int, placement: Placement) -> tuple[Placement, ...]:
    return (*placements[:axis], placement, *placements[axis + 1 :])
