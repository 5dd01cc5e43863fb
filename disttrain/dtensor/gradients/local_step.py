"""Steps of torch.optim's optimizers, taken on the local parts: each parameter is unwrapped once, not once per operator.

An optimizer that works element by element does the same to a part as to the whole. So if its parameters, gradients and
state all exist and have the same layouts, a stand-in takes the step. It shares the optimizer's settings and the memory
of its state. Other steps, such as the first, which creates the state, run on DTensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_, is_not
from typing import Any, Final

import torch
from torch import optim
from torch.optim import optimizer as torch_optimizer

from disttrain.dtensor._torch import without_overrides
from disttrain.dtensor.dtensor import DTensor
from disttrain.dtensor.local_part import local_part, spec_of
from disttrain.dtensor.views.view_copy import count_writes

_BY_ELEMENT: Final = frozenset(
    {
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.Adamax,
        optim.AdamW,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)
"""Optimizers that compute each element by itself and, after their first step, write their state in place. A class
derived from one of them may do otherwise."""

_NO_STATE: Final[dict[str, Any]] = {}

# A fused step on many small parameters takes no longer than a check of each of them in Python would. So lists are made
# and compared by functions that loop in C.
_grad_of: Final = attrgetter("grad")


def use_local_steps() -> None:
    """From now on, optimizers of DTensors step on the local parts if that gives the same result."""
    torch_optimizer.register_optimizer_step_pre_hook(_send_stand_in)
    torch_optimizer.register_optimizer_step_post_hook(_let_go_of_gradients)


class _Parts:
    """The parts of DTensors that one group of parameters is, and what they were made of."""

    def __init__(self, params: Sequence[Any], states: Sequence[dict[str, Any]]) -> None:
        self.params = params
        self.specs = [*map(spec_of, params)]
        self.locals = [*map(local_part, params)]
        self.states = states
        self.values = [*chain.from_iterable(map(dict.values, states))]
        self.wrapped = [value for value in self.values if isinstance(value, DTensor)]
        self.wrapped_locals = [*map(local_part, self.wrapped)]
        self.parts = [local.detach() for local in self.locals]
        self.local_state: dict[torch.Tensor, dict[str, Any]] = {
            part: {name: value._local_tensor if isinstance(value, DTensor) else value for name, value in state.items()}
            for part, state in zip(self.parts, states, strict=True)
        }

    def can_step(self) -> bool:
        """True where all state is there, and lies as its parameter does."""
        for spec, state in zip(self.specs, self.states, strict=True):
            if spec.layout.has_partial or spec.view_copy is not None:
                return False
            for value in state.values():
                if not isinstance(value, torch.Tensor) or getattr(value, "_spec", spec) is not spec:
                    return False
        return True

    def are_of(self, params: Sequence[Any]) -> bool:
        """True while the parameters and the tensors of their state are the same objects; no element is compared."""
        return (
            _same(params, self.params)
            and _same(map(local_part, params), self.locals)
            and _same(map(spec_of, params), self.specs)
            and sum(map(len, self.states)) == len(self.values)
            and _same(chain.from_iterable(map(dict.values, self.states)), self.values)
            and _same(map(local_part, self.wrapped), self.wrapped_locals)
        )


def _same(objects: Iterable[object], expected: Sequence[object]) -> bool:
    """True where both have the same objects; `objects` is no longer than `expected`."""
    return all(map(is_, objects, expected))


class _StandIn:
    """The parts of one optimizer's parameters; it lives as long as the optimizer does."""

    def __init__(self) -> None:
        self.parts_of_groups: dict[int, _Parts] = {}
        self._all_params: list[Any] = []
        self._all_states: list[dict[str, Any]] = []

    def look_at(self, state: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Forget the parts when the optimizer's state is that of others, or other state."""
        is_same = len(state) == len(self._all_params) and _same(state, self._all_params)
        if not (is_same and _same(state.values(), self._all_states)):
            self.parts_of_groups.clear()
            self._all_params, self._all_states = [*state], [*state.values()]

    def local_group(
        self, optimizer: optim.Optimizer, index: int, state: dict[torch.Tensor, dict[str, Any]]
    ) -> dict[str, Any] | None:
        """A group with the parts of its parameters that have a gradient; their state is put into `state`.

        None where a step on them would not be a step on the whole.
        """
        group = optimizer.param_groups[index]
        params: list[Any] = group["params"]
        plain: list[torch.Tensor] = []
        if {*map(type, params)} != {DTensor}:
            plain = [param for param in params if not isinstance(param, DTensor)]
            params = [param for param in params if isinstance(param, DTensor)]
            state.update({param: optimizer.state[param] for param in plain if param in optimizer.state})
        grads = [*map(_grad_of, params)]
        if not all(map(is_not, grads, repeat(None))):
            params = [param for param, grad in zip(params, grads, strict=True) if grad is not None]
            grads = [*map(_grad_of, params)]
        needs_no_state = type(optimizer) is optim.SGD and not group["momentum"]
        if not (needs_no_state or all(param in state for param in plain)):
            return None
        parts = self.parts_of_groups.get(index)
        if parts is None or len(parts.params) != len(params) or not parts.are_of(params):
            states = [optimizer.state.get(param, _NO_STATE) for param in params]
            if not (needs_no_state or all(states)):
                return None
            parts = _Parts(params, states)
            if not parts.can_step():
                return None
            self.parts_of_groups[index] = parts
        if not {*map(type, grads)} <= {DTensor} or not _same(map(spec_of, grads), parts.specs):
            return None
        for part, grad in zip(parts.parts, map(local_part, grads), strict=True):
            part.grad = grad
        state.update(parts.local_state)
        return {**group, "params": [*parts.parts, *plain]}

    def let_go(self) -> None:
        """Forget the gradients, which the caller frees when he is done with them."""
        for parts in self.parts_of_groups.values():
            for part in parts.parts:
                part.grad = None


def _send_stand_in(
    optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of `step` with one that steps on the local parts in place of `optimizer`; None where none can."""
    # A closure makes gradients during the step, and a hook of the optimizer may still change them.
    if type(optimizer) not in _BY_ELEMENT or len(args) > 1 or kwargs or optimizer._optimizer_step_pre_hooks:
        return None
    groups = optimizer.param_groups
    firsts = chain.from_iterable(group["params"][:1] for group in groups)
    if torch.compiler.is_compiling() or not any(isinstance(first, DTensor) for first in firsts):
        return None
    stand_in: _StandIn = optimizer.__dict__.setdefault("_stand_in", _StandIn())
    state: dict[torch.Tensor, dict[str, Any]] = {}
    local_groups = []
    stand_in.look_at(optimizer.state)
    with without_overrides():
        for index, group in enumerate(groups):
            local_group = None if group.get("differentiable") else stand_in.local_group(optimizer, index, state)
            if local_group is None:
                stand_in.let_go()
                return None
            local_groups.append(local_group)
    local_optimizer = object.__new__(type(optimizer))
    local_optimizer.__dict__.update(optimizer.__dict__, state=state, param_groups=local_groups)
    return (local_optimizer,), kwargs


def _let_go_of_gradients(optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    stand_in: _StandIn | None = optimizer.__dict__.get("_stand_in")
    if stand_in is not None:
        for parts in stand_in.parts_of_groups.values():
            # Graphs and view copies that have kept the DTensors do not see writes to the parts.
            count_writes(parts.params)
            count_writes(parts.wrapped)
        stand_in.let_go()
