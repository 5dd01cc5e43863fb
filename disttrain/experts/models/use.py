"""One call that has a model's experts computed by grouped products."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from disttrain.console import write
from disttrain.experts.models import forwards
from disttrain.experts.models.computation import Computation, named
from disttrain.experts.models.replicas import Replica
from disttrain.experts.models.stacked import StackedWeights, others, stacked_weights
from disttrain.experts.models.trials import agreed, call_of, computations, inputs_of

_DTYPES: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_IMPLEMENTATIONS: Final = ("eager", "batched_mm", "grouped_mm", "deepgemm", "sonicmoe", None)
"""Transformers' own ways to compute the same."""


class Taken(NamedTuple):
    """A module called `name`, whose experts, held as `what` says, grouped products compute now."""

    name: str
    what: str


class Left(NamedTuple):
    """A module called `name` that looks like experts and stays as it is, and why."""

    name: str
    why: str


class Adopted(NamedTuple):
    """What `use_experts` did."""

    taken: tuple[Taken, ...]
    left: tuple[Left, ...]


def use_experts(model: nn.Module, report: Callable[[str], None] = write) -> Adopted:
    """Let `model`, which stays the same object with the same parameters and names, compute its experts by grouped
    products."""
    taken: list[Taken] = []
    left: list[Left] = []
    known: dict[Any, Any] = {}
    for name, module in model.named_modules():
        ways = stacked_weights(module)
        if not ways or hasattr(type(module), "_experts_of"):
            continue
        key = _key(module)
        if key not in known:
            known[key] = _class_of(module, ways)
        kind, why = known[key]
        if kind is None:
            left.append(Left(name, why))
        else:
            module.__class__ = kind
            taken.append(Taken(name, type(module).__name__))
    counts = Counter(one.what for one in taken)
    lines = ", ".join(f"{count} x {what}" for what, count in sorted(counts.items())) or "nothing"
    report(f"use_experts: {type(model).__name__}: {lines}")
    for one in left:
        report(f"use_experts: {one.name} stays as it is: {one.why}")
    return Adopted(tuple(taken), tuple(left))


def _key(module: nn.Module) -> Any:
    values = [
        (f"{prefix}.{name}", value)
        for prefix, part in module.named_modules()
        for name, value in vars(part).items()
        if not name.startswith("_") and isinstance(value, int | float | str | None)
    ]
    shapes = [(name, tuple(value.shape), value.dtype) for name, value in module.named_parameters()]
    types = [type(part) for part in module.modules()]
    return (tuple(types), tuple(values), tuple(shapes), "forward" in vars(module))


def _class_of(module: nn.Module, ways: list[StackedWeights]) -> tuple[type[nn.Module] | None, str]:
    why = _obstacle(module, ways[0])
    kind, names = call_of(module)
    if not why and not kind:
        why = f"its forward takes ({', '.join(names)})"
    if why:
        return None, why
    for weights in ways:
        candidates = list(computations(module, weights))
        replica = Replica(module, weights.width, weights.hidden, weights.num_experts)
        small = _replaced_weights(replica.module, weights)
        trials = [_forward_by(small, how, kind) for how in candidates]
        index, why = agreed(replica, type(module).forward, trials, inputs_of(replica, kind, weights.num_experts))
        if index is not None:
            return _class_with(module, weights, candidates[index], kind, names), ""
    return None, why


def _replaced_weights(module: nn.Module, weights: StackedWeights) -> StackedWeights:
    return next(way for way in stacked_weights(module) if way.is_transposed == weights.is_transposed)


def _obstacle(module: nn.Module, weights: StackedWeights) -> str:
    more = sorted(others(module, weights))
    dtypes = {named(module, name).dtype for name in weights.names} - {*_DTYPES}
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if dtypes:
        return f"its weights are of {', '.join(sorted(map(str, dtypes)))}"
    if more:
        return f"it has {', '.join(more)} besides the experts' weights"
    if "forward" in vars(module):
        return "its forward was replaced on the module itself, as some libraries do"
    if implementation not in _IMPLEMENTATIONS:
        return f"its config's experts_implementation is {implementation!r}, which is not one of transformers' own"
    return ""


def _forward_by(weights: StackedWeights, how: Computation, kind: str) -> Callable[..., Any]:
    function: Any = getattr(forwards, kind)

    def forward(self: nn.Module, *values: Any) -> Any:
        given = forwards.in_roles(values) if kind == "routed" else values
        if given is None:
            raise TypeError("tokens, indices and weights are wanted")
        stacks = weights.stacks(self)
        return function(*given, weights.num_experts, lambda rows, ends: how.outputs(self, rows, ends, stacks))

    return forward


def _class_with(
    module: nn.Module, weights: StackedWeights, how: Computation, kind: str, names: tuple[str, ...]
) -> type[nn.Module]:
    base = type(module)
    as_ever: Any = base.forward
    ours = _forward_by(weights, how, kind)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return ours(self, *forwards.bound(names, args, kwargs))

    forward.__code__ = forward.__code__.replace()
    forward = wraps(as_ever)(forward)
    return type(
        base.__name__,
        (base,),
        {"forward": forward, "_experts_of": weights, "_how": how, "__module__": base.__module__, "__doc__": base.__doc__},
    )
