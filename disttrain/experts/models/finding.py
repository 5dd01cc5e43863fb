"""Finds a module's experts, and the class that computes them so; once for modules that are alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from disttrain.experts.expert_layer import ExpertLayer
from disttrain.experts.models.blocks import block_forwards
from disttrain.experts.models.computation import Assumed, Computation
from disttrain.experts.models.layers import FORWARDS, StackedExperts, class_with, routed
from disttrain.experts.models.lists import ListedExperts, ListedWeights, listed_weights
from disttrain.experts.models.replicas import Replica
from disttrain.experts.models.stacked import StackedWeights, others, stacked_weights
from disttrain.experts.models.trials import TOKENS, UNLIKE, agreed, call_of, computations, inputs_of
from disttrain.experts.models.unusual import dropout_in

_DTYPES: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_UNLIKE_ALONE: Final = "one expert alone computes nothing that is known"
_IMPLEMENTATIONS: Final = ("eager", "batched_mm", "grouped_mm", "deepgemm", "sonicmoe", None)
"""Transformers' own ways to compute the same."""


@dataclass(frozen=True)
class Finding:
    """A class for a module, and for one inside it; or why there is none."""

    kind: type[nn.Module] | None
    why: str = ""
    inner: tuple[str, type[nn.Module]] | None = None

    def apply(self, module: nn.Module) -> None:
        """Give the module its class; it stays the same object."""
        if self.inner is not None:
            getattr(module, self.inner[0]).__class__ = self.inner[1]
        assert self.kind is not None
        module.__class__ = self.kind


def found(module: nn.Module, findings: dict[Hashable, Finding]) -> Finding | None:
    """Tells what `module` is; None where it has no experts. `findings` keeps what is known of others that are alike."""
    find = _finder(module)
    if find is None:
        return None
    key = _likeness(module)
    if key not in findings:
        why = _obstacle(module)
        finding = Finding(None, why) if why else find(module)
        if finding.why in (UNLIKE, _UNLIKE_ALONE):
            finding = Finding(None, dropout_in(module) or finding.why)
        findings[key] = finding
    return findings[key]


def looks_like_experts(module: nn.Module, name: str) -> bool:
    """True for what has parameters and is called experts, itself or by its class."""
    names = (name.rpartition(".")[2].lower(), type(module).__name__.lower())
    is_called_so = any(part.endswith(("experts", "moe", "moa")) and "shared" not in part for part in names)
    return is_called_so and any(True for _ in module.parameters())


def _finder(module: nn.Module) -> Callable[[nn.Module], Finding] | None:
    if stacked_weights(module):
        return _of_stacked
    if isinstance(module, nn.ModuleList):
        has_forward = type(module).forward is not nn.ModuleList.forward
        return _of_list if has_forward and len(module) > 1 and listed_weights(module) else None
    for name, child in module.named_children():
        is_list = type(child) is nn.ModuleList and len(child) > 1 and "expert" in name
        if is_list or getattr(type(child), "_call", "") == "batched":
            return lambda block: _of_block(block, name)
    return None


def _of_stacked(module: nn.Module) -> Finding:
    kind, names = call_of(module)
    if not kind:
        return Finding(None, f"its forward takes ({', '.join(names)})")
    why = ""
    for weights in stacked_weights(module):
        more = sorted(others(module, weights))
        if more:
            return Finding(None, f"it has {', '.join(more)} besides its experts' weights")
        orders = (False, True) if len(weights.into) == 2 else (False,)
        classes = [
            class_with(module, (StackedExperts,), FORWARDS[kind], names, _weights=weights, _how=how, _call=kind)
            for how in computations(module, weights, orders)
        ]
        replica = Replica(module, weights.width, weights.hidden, weights.num_experts)
        index, reason = agreed(
            replica, type(module).forward, [*map(_as, classes)], inputs_of(replica, kind, weights.num_experts)
        )
        if index is not None:
            return Finding(classes[index])
        # A way to read shapes by which the module cannot be called says less than one by which it can.
        why = reason if reason == UNLIKE else why or reason
    return Finding(None, why)


def _as(kind: type[nn.Module]) -> Callable[..., Any]:
    """The forward of a class, of a module that is of another one."""

    def forward(module: nn.Module, *args: Any) -> Any:
        before = type(module)
        module.__class__ = kind
        try:
            return module.forward(*args)
        finally:
            module.__class__ = before

    return forward


def _of_list(module: nn.Module) -> Finding:
    kind, names = call_of(module)
    if kind != "routed":
        return Finding(None, f"its forward takes ({', '.join(names)})")
    assert isinstance(module, nn.ModuleList)
    why = ""
    for weights in listed_weights(module):
        classes = [
            class_with(module, (ListedExperts,), routed, names, **_of_listed(module, weights, how))
            for how in computations(module[0], weights)
        ]
        replica = Replica(module, weights.width, weights.hidden, weights.num_experts)
        index, why = agreed(
            replica, type(module).forward, [*map(_as, classes)], inputs_of(replica, kind, weights.num_experts)
        )
        if index is not None:
            return Finding(classes[index])
    return Finding(None, why)


def _of_listed(experts: nn.ModuleList, weights: ListedWeights, how: Computation) -> dict[str, Any]:
    return {
        "_weights": weights,
        "_how": how,
        "_expert": type(experts[0]),
        "_assumed": Assumed.of(experts[0]),
        "_call": "routed",
    }


def _of_block(module: nn.Module, name: str) -> Finding:
    experts = getattr(module, name)
    if isinstance(experts, ExpertLayer):
        return _of_forward(module, name, experts, None)
    ways = list(_list_classes(experts))
    if not ways:
        return Finding(None, _UNLIKE_ALONE)
    return _of_forward(module, name, experts, ways[0])


def _list_classes(experts: nn.ModuleList) -> Iterator[tuple[ListedWeights, type[nn.Module]]]:
    """The ways in which one expert may be computed, by trials of the first."""
    for weights in listed_weights(experts):
        replica = Replica(experts[0], weights.width, weights.hidden, weights.num_experts)
        hows = list(computations(experts[0], weights))

        def forward_of(how: Computation, weights: ListedWeights = weights) -> Callable[..., Any]:
            def forward(expert: nn.Module, x: torch.Tensor) -> Any:
                ends = torch.full((1,), len(x), dtype=torch.int32)
                return how.outputs(expert, x, ends, weights.stacks([expert]))

            return forward

        inputs = [(replica.drawn(TOKENS, replica.width, scale=3.0),)]
        index, _ = agreed(replica, type(experts[0]).forward, [*map(forward_of, hows)], inputs)
        if index is not None:
            values = _of_listed(experts, weights, hows[index])
            yield weights, class_with(experts, (ListedExperts,), routed, ("x", "indices", "weights"), **values)


def _of_forward(
    module: nn.Module, name: str, experts: nn.Module, listed: tuple[ListedWeights, type[nn.Module]] | None
) -> Finding:
    call, names = call_of(module)
    if call != "batched":
        return Finding(None, f"its forward takes ({', '.join(names)})")
    if listed is None:
        stacks: StackedWeights = experts._weights  # type: ignore[assignment]
        num_experts, width, hidden = stacks.num_experts, stacks.width, stacks.hidden
    else:
        num_experts, width, hidden = listed[0].num_experts, listed[0].width, listed[0].hidden
    replica = Replica(module, width, hidden, num_experts)
    candidates = list(block_forwards(module, name, num_experts, is_batched=listed is None))

    def forward_of(candidate: Any) -> Callable[..., Any]:
        def forward(block: nn.Module, x: torch.Tensor) -> Any:
            inner = getattr(block, name)
            before = type(inner)
            inner.__class__ = before if listed is None else listed[1]
            try:
                return candidate(block, x)
            finally:
                inner.__class__ = before

        return forward

    tokens = replica.drawn(TOKENS, replica.width, scale=3.0)
    inputs = [(tokens.view(2, -1, replica.width),), (tokens,)]
    index, why = agreed(replica, type(module).forward, [*map(forward_of, candidates)], inputs)
    if index is None:
        return Finding(None, why)
    kind = class_with(module, (), candidates[index].__call__, names, name)
    return Finding(kind, inner=None if listed is None else (name, listed[1]))


def _obstacle(module: nn.Module) -> str:
    """Why a module that has experts is not even tried."""
    dtypes = sorted({str(value.dtype) for value in module.parameters() if value.dtype not in _DTYPES})
    if dtypes:
        return f"it has parameters of {', '.join(dtypes)}"
    if "forward" in vars(module):
        return "its forward was replaced on the module itself, as some libraries do"
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if implementation not in _IMPLEMENTATIONS:
        return f"its experts_implementation is {implementation!r}, which is none of transformers' own"
    return ""


def _likeness(module: nn.Module) -> Hashable:
    """The key that two modules share if what is found for one is so for the other."""
    values = [
        (prefix, name, value)
        for prefix, part in module.named_modules()
        for name, value in vars(part).items()
        if not name.startswith("_") and name != "training" and isinstance(value, int | float | str | None)
    ]
    shapes = [(name, tuple(value.shape), value.dtype) for name, value in module.named_parameters()]
    return (
        tuple(type(part) for part in module.modules()),
        tuple(values),
        tuple(shapes),
        "forward" in vars(module),
        getattr(getattr(module, "config", None), "_experts_implementation", None),
    )
