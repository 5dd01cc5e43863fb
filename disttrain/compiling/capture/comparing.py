"""Takes a step twice from the same state, by its recording and as it is: what differs would be stale in replays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from disttrain.compiling._torch import count_writes, tree_leaves
from disttrain.compiling.capture.forms import OPERATION, part_of
from disttrain.compiling.capture.graph import StepGraph
from disttrain.compiling.capture.subjects import Subjects
from disttrain.errors import CompileError

TOLERANCE: Final = 0.02
"""The norm of a difference over that of a change: sums in another order stay far below it, a rate of another step does
not."""


def play_and_compare(
    graph: StepGraph, step: Callable[..., Any], tensors: Sequence[torch.Tensor], args: Any, kwargs: Any
) -> Any:
    """Returns the results of the step as it is, which is what remains done.

    Raises: CompileError where the recording gives others, naming the first results, parameters or states.
    """
    subjects = graph.subjects
    before = _State(subjects)
    played = tree_leaves(graph.play(tensors))
    by_graph = _State(subjects)
    before.restore(subjects)
    results = step(*args, **kwargs)
    as_it_is = _State(subjects)
    expected = [value.detach() for value in tree_leaves(results) if isinstance(value, torch.Tensor)]
    different = [
        f"result {index}"
        for index, (value, other) in enumerate(zip(played, expected, strict=True))
        if _differ(torch.zeros_like(part_of(other)), part_of(value), part_of(other))
    ]
    for name, old in before.tensors.items():
        if _differ(old, by_graph.tensors[name], as_it_is.tensors[name]):
            different.append(name)
    if different:
        shown = ", ".join(different[:4]) + (f" and {len(different) - 4} more" if len(different) > 4 else "")
        problem = f"a replay gives another value than the step as it is for {shown}."
        raise CompileError(OPERATION, problem, "Look there for what the host computes anew in each step.")
    return results


def _differ(old: torch.Tensor, value: torch.Tensor, expected: torch.Tensor) -> bool:
    if not expected.is_floating_point():
        return not torch.equal(value, expected)
    change = torch.linalg.vector_norm((expected - old).float())
    distance = torch.linalg.vector_norm((value - expected).float())
    # Also true where one of them is nan, and the other is not.
    return bool(~(distance <= TOLERANCE * change)) and not bool(change.isnan() & distance.isnan())


class _State:
    """Copies of all that a step may write to, and of the random state."""

    def __init__(self, subjects: Subjects) -> None:
        with torch.no_grad():
            self.tensors = {name: part_of(tensor).detach().clone() for name, tensor in subjects.tensors().items()}
            self._grads = [None if grad is None else (grad, part_of(grad).clone()) for grad in subjects.grads()]
        self._random = torch.cuda.get_rng_state()

    def restore(self, subjects: Subjects) -> None:
        with torch.no_grad():
            current = subjects.tensors()
            for name, saved in self.tensors.items():
                part_of(current[name]).copy_(saved)
            for parameter, entry in zip(subjects.parameters, self._grads, strict=True):
                if entry is not None:
                    part_of(entry[0]).copy_(entry[1])
                parameter.grad = None if entry is None else entry[0]
        count_writes(current.values())
        torch.cuda.set_rng_state(self._random)
