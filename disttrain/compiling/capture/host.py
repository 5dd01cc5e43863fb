"""The state that a step changes on the host: counts, rates, random numbers, and which gradients there are.

While a step is recorded its host part runs, but no GPU works. If the recording fails, all of it is put back: the step
that is then called as it is would count twice, and take for computed what no GPU has computed. If it succeeds, replays
repeat the GPU's work alone: what the host has changed by itself would stay as it is from then on. `changes` names it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch

from disttrain.compiling.capture.forms import part_of
from disttrain.compiling.capture.subjects import Subjects

_COUNTS = "forget_copies"
"""Optimizers with this method count their steps at each replay by themselves."""


class HostState:
    """What the host's state was before a recording.

    Args: keepers  LR schedulers and loss scalers that the step refers to.
    """

    def __init__(self, subjects: Subjects, keepers: Sequence[Any]) -> None:
        self._subjects = subjects
        self._grads = subjects.grads()
        self._tensors = [(name, tensor, tensor.detach().clone()) for name, tensor in _on_the_host(subjects)]
        self._states = [
            (optimizer, {parameter: (state, dict(state)) for parameter, state in optimizer.state.items()})
            for optimizer in subjects.optimizers
        ]
        self._groups = [(group, dict(group)) for optimizer in subjects.optimizers for group in optimizer.param_groups]
        self._kept = [(keeper, _copied(vars(keeper))) for keeper in keepers]
        self._random = [(set_state, get_state()) for get_state, set_state in _generators()]

    def restore(self) -> None:
        """Puts all of it back."""
        for parameter, grad in zip(self._subjects.parameters, self._grads, strict=True):
            # What it has got instead lies in the recording's memory, where nothing was computed.
            if parameter.grad is not grad:
                parameter.grad = grad
        with torch.no_grad():
            for _, tensor, value in self._tensors:
                tensor.copy_(value)
        for optimizer, states in self._states:
            for parameter in [each for each in optimizer.state if each not in states]:
                # As tensors of it that the recording would have filled.
                del optimizer.state[parameter]
            for state, entries in states.values():
                state.clear()
                state.update(entries)
            if hasattr(optimizer, "distrust_masters"):
                optimizer.distrust_masters()
        for group, entries in self._groups:
            group.clear()
            group.update(entries)
        for keeper, entries in self._kept:
            vars(keeper).clear()
            vars(keeper).update(entries)
        for set_state, value in self._random:
            set_state(value)

    def changes(self) -> str:
        """What the step has changed on the host by itself, a whole sentence; empty where nothing."""
        counters = [optimizer for optimizer in self._subjects.optimizers if hasattr(optimizer, _COUNTS)]
        states = chain.from_iterable(optimizer.state.values() for optimizer in counters)
        counted = {id(value) for state in states for value in state.values()}
        now = dict(_on_the_host(self._subjects))
        for name, _, value in self._tensors:
            tensor = now.get(name, value)
            if id(tensor) not in counted and not _is_same(tensor, value):
                return f"{name} lies on the host, and the step changes it: replays would not."
        for group, entries in self._groups:
            for name, value in group.items():
                if name != "params" and not _is_same(value, entries.get(name)):
                    return f"the step changes {name} of an optimizer on the host: replays would not."
        for keeper, entries in self._kept:
            if not _is_same(vars(keeper), entries):
                return f"the step changes a {type(keeper).__name__}, which is the host's: replays would not."
        return ""

    def has_drawn(self) -> bool:
        """True if random numbers were drawn on the host since, by the step or by other threads."""
        generators = [get_state for get_state, _ in _generators()]
        drawn = zip(generators, self._random, strict=False)
        return any(not _is_same(get_state(), value) for get_state, (_, value) in drawn)


def _on_the_host(subjects: Subjects) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in subjects.tensors().items():
        part = part_of(tensor)
        if part.device.type == "cpu":
            yield name, part


def _generators() -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    yield torch.get_rng_state, torch.set_rng_state
    yield random.getstate, random.setstate
    if (numpy := sys.modules.get("numpy")) is not None:
        yield numpy.random.get_state, numpy.random.set_state


def _copied(value: Any) -> Any:
    """A copy of dicts, lists and what is in them, as far as these go; other values are those there are."""
    if isinstance(value, dict):
        # A defaultdict stays one.
        copy = value.copy()
        for key, each in value.items():
            copy[key] = _copied(each)
        return copy
    return [_copied(each) for each in value] if type(value) is list else value


def _is_same(value: Any, other: Any) -> bool:
    """True for equal numbers, and for what is the same object; dicts, lists and tuples item by item."""
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(_is_same(value[key], other[key]) for key in value)
    if type(value) in (list, tuple) and type(value) is type(other):
        return len(value) == len(other) and all(map(_is_same, value, other))
    if value is other:
        return True
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        are_alike = (value.shape, value.dtype, value.device) == (other.shape, other.dtype, other.device)
        return are_alike and not value.is_cuda and bool(((value == other) | (value.isnan() & other.isnan())).all())
    if isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor) or type(value) is not type(other):
        return False
    return bool((value == other).all()) if hasattr(value, "dtype") else bool(value == other)
