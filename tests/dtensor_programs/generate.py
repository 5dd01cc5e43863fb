"""A program from a seed."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence

from tests.dtensor_programs.draw import Draw, Value
from tests.dtensor_programs.execute import Run, plain_leaf, plain_redistribute
from tests.dtensor_programs.families import FAMILIES
from tests.dtensor_programs.program import Program, Step, without

MESHES: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((1,), (1, 1), (1, 1, 1)),
    2: ((2,), (2,), (2, 1), (1, 2), (1, 2, 1)),
    3: ((3,), (3,), (1, 3), (3, 1), (1, 1, 3)),
    4: ((4,), (2, 2), (2, 2), (4, 1), (1, 4), (2, 1, 2), (1, 2, 2)),
}
_WORLD_SIZES = (1, 2, 2, 2, 3, 3, 3, 4, 4)


def generate(seed: int) -> Program:
    """The program of this seed, the same wherever it is asked for."""
    chance = random.Random(seed)
    mesh_shape = chance.choice(MESHES[chance.choice(_WORLD_SIZES)])
    draw = Draw(seed, mesh_shape)
    families, weights = list(FAMILIES), list(FAMILIES.values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(chance.choice((1, 1, 2))):
            draw.leaf(draw.shape())
        # Some of what is tried torch refuses.
        num_steps = len(draw.steps) + chance.randint(4, 14)
        for _ in range(4 * num_steps):
            if len(draw.steps) >= num_steps:
                break
            chance.choices(families, weights)[0](draw)
        for _ in range(chance.choice((0, 1, 1, 2))):
            derive(draw)
    return Program(mesh_shape, _used(_taken(draw.steps)), seed)


def derive(draw: Draw) -> None:
    """The gradient of something, weighted, and perhaps that one's gradient."""
    output = draw.pick(lambda value: value.is_float and value.tensor.requires_grad)
    for again in (draw.random.random() < 0.4, False):
        if output is None or not output.tensor.requires_grad:
            return
        weighted = draw.do(".mul", output, draw.leaf(output.shape, output.tensor.dtype))
        inputs = [value for value in draw.values if value.tensor.requires_grad and value.tensor.is_leaf][:4]
        if not weighted or not inputs:
            return
        if draw.random.random() < 0.3:
            draw.do("backward", weighted[0])
        inner = draw.pick(lambda value: value.tensor.requires_grad and value.is_float)
        # What a gradient's gradient is by a result depends on which formula the first one has.
        is_first = all(step.function != "gradient" for step in draw.steps)
        if draw.random.random() < 0.3 and inner is not None and is_first:
            inputs.append(inner)
        grads: list[Value] = draw.do("gradient", weighted[0], inputs, again)
        grads = [grad for grad in grads if grad.tensor.requires_grad]
        output = draw.random.choice(grads) if grads else None


def _taken(steps: list[Step]) -> tuple[Step, ...]:
    """Without what torch refuses when it comes to it, since nobody has looked at the tensors in between."""
    kept: tuple[Step, ...] = tuple(steps)
    while (number := first_refused(kept)) is not None:
        kept = without(kept, {number})
    return kept


def first_refused(steps: Sequence[Step]) -> int | None:
    """The first step that fails on plain tensors."""
    run = Run(plain_leaf, plain_redistribute)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in steps:
            try:
                run.do(step)
            except Exception:  # noqa: BLE001 -- whatever torch refuses
                return step.number
    return None


def _used(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Without leaves that nothing needs."""
    needed = {number for step in steps for number in step.needs}
    return tuple(step for step in steps if step.function != "leaf" or step.number in needed)
