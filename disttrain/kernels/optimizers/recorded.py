"""The host's part of an optimizer's step that is recorded as a CUDA graph: counts steps, and reads rates anew."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import is_
from typing import Any, Final, Protocol

import torch

from disttrain.dtensor import DTensor
from disttrain.dtensor.views.view_copy import count_writes
from disttrain.kernels.optimizers.counts import joined_steps
from disttrain.kernels.optimizers.rules import Rule, numbers_of


class Stepper(Protocol):
    """The optimizer, as far as this file knows it."""

    max_norm: float | None
    state: Any

    def rule(self, group: dict[str, Any], step: int) -> Rule: ...

    def begin_step(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]: ...

    def trust_masters(self, parameters: Sequence[torch.Tensor]) -> None: ...


@dataclass(frozen=True)
class Launch:
    """One launch of a step: a group's parameters that are at the same step. `numbers` (ROW,) int64, on the device, are
    those of the rule at each replay of a recorded launch."""

    group: dict[str, Any]
    parameters: Sequence[torch.Tensor]
    rule: Rule
    numbers: torch.Tensor | None = None


class RecordedStep:
    """Counts the steps of replays, and writes the numbers of each step's rule where the recorded kernels read them.

    The steps of a launch are parts of one tensor, so that counting them takes one operator, not one for each.
    """

    def __init__(self, optimizer: Stepper, launches: Sequence[Launch]) -> None:
        self._optimizer = optimizer
        self._launches = launches
        self._max_norm = optimizer.max_norm
        self._state = optimizer.state
        parameters = [(parameter, launch.group) for launch in launches for parameter in launch.parameters]
        states = [optimizer.state[parameter] for parameter, _ in parameters]
        self._with_masters = [entry for entry, state in zip(parameters, states, strict=True) if "master" in state]
        self._counts = [
            joined_steps([optimizer.state[parameter] for parameter in each.parameters]) for each in launches
        ]
        self._forms = [_form_of(launch.rule) for launch in launches]
        self._values = [state.values() for state in states]
        self._had = [*self._state_tensors()]
        self._sharded = [value for values in self._values for value in values if isinstance(value, DTensor)]

    def obstacle(self) -> str:
        name = type(self._optimizer).__name__
        if self._optimizer.max_norm != self._max_norm:
            return f"{name}.max_norm was {self._max_norm}, and is {self._optimizer.max_norm}."
        if self._optimizer.state is not self._state or not all(map(is_, self._state_tensors(), self._had)):
            return f"{name} has other state tensors than it had: a state was loaded."
        for launch, counts, form in zip(self._launches, self._counts, self._forms, strict=True):
            if not torch.equal(counts, counts[:1].expand_as(counts)):
                return f"{name}'s parameters are not at the same step any more."
            if _form_of(self._rule(launch, 1)) != form:
                return f"{name}'s rule is another than it was."
        return ""

    def before_first(self) -> None:
        for launch in self._launches:
            _put(launch, launch.rule)

    def before_replay(self) -> None:
        for parameter, group in self._with_masters:
            self._optimizer.begin_step(parameter, group)
        for launch, counts in zip(self._launches, self._counts, strict=True):
            counts.add_(1)
            _put(launch, self._rule(launch, int(counts[0].item())))

    def after_replay(self) -> None:
        # Parameters' writes are counted with all others of the recording.
        count_writes(self._sharded)
        self._optimizer.trust_masters([parameter for parameter, _ in self._with_masters])

    def _state_tensors(self) -> Iterable[Any]:
        # With an end, so that there can't be one more or less.
        return chain(chain.from_iterable(self._values), (_END,))

    def _rule(self, launch: Launch, step: int) -> Rule:
        return self._optimizer.rule(launch.group, step)


_END: Final = object()
_NUMBERS: Final[dict[str, Any]] = dict.fromkeys(
    ("lr", "weight_decay", "beta1", "beta2", "eps", "correction1", "correction2", "step"), 0
)
"""The fields of a rule that may differ in each replay."""


def _form_of(rule: Rule) -> Rule:
    """The rule without its numbers."""
    return replace(rule, **_NUMBERS)


def _put(launch: Launch, rule: Rule) -> None:
    assert launch.numbers is not None
    # What is not pinned is read at once, so that the host may go on.
    launch.numbers.copy_(torch.tensor(numbers_of(rule)), non_blocking=True)
