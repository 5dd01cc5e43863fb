"""Layers of experts made of modules that were written elsewhere, by another class for the same object."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, wraps
from typing import Any

import torch
from torch import nn

from disttrain._python.made_classes import made_by
from disttrain.dtensor import Placement, Replicate, Shard, StridedShard
from disttrain.errors import ShapeError, ShardingError
from disttrain.experts.crossing import GatedExperts
from disttrain.experts.expert_layer import ExpertLayer
from disttrain.experts.hidden_cut import hidden_placements
from disttrain.experts.models.computation import Assumed, Computation, named
from disttrain.experts.models.stacked import StackedWeights
from disttrain.kernels.grouped.rows import ExpertOrder


class StackedExperts(ExpertLayer):
    """Experts whose weights lie one behind the other. The module's own class is the other base."""

    _weights: StackedWeights
    _how: Computation

    def count_experts(self) -> int:
        """The experts of all ranks."""
        return self._weights.num_experts

    def expert_width(self) -> int:
        """The columns of the rows that experts take."""
        return self._weights.width_of(self)

    def expert_tensors(self) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        """Parameters whose dim 0 is the experts', with the modules that have them and their names there."""
        for path in self._weights.names:
            owner, _, name = path.rpartition(".")
            yield (named(self, owner) if owner else self), name, named(self, path)

    def float8_obstacle(self) -> str:
        """Why products cannot be in float8; empty where they can."""
        return self._how.float8_obstacle(self._weights.width, self._weights.hidden)

    def hidden_cuts(self) -> Sequence[Placement] | None:
        """The cut of each of `expert_tensors` along the hidden dim; None where outputs are more than sums along it."""
        weights, how = self._weights, self._how
        if weights.is_flat or how.norm or (how.gated is None and weights.has_gate and how.takes != "gate"):
            return None
        is_interleaved = how.gated is not None and how.gated.is_interleaved
        is_fused = weights.has_gate and len(weights.into) == 1
        into, back = hidden_placements(
            is_transposed=weights.is_transposed, is_interleaved=is_interleaved, is_fused=is_fused
        )
        into_bias = StridedShard(1, 2) if is_fused and not is_interleaved else Shard(1)
        down_bias = [Replicate()] if weights.down_bias else []
        return [*[into] * len(weights.into), back, *[into_bias] * len(weights.into_bias), *down_bias]

    def compute(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """This rank's experts on rows that are sorted by them."""
        return self._how.outputs(self, rows, ends, self._weights.stacks(self, len(ends)), self.float8)

    def gated_experts(self) -> GatedExperts | None:
        """This rank's experts, where it has some and they are nothing but gated layers."""
        count = self.count_experts_here()
        if self._how.gated is None or self._how.norm or not count:
            return None
        return self._how.gated_experts(self._weights.stacks(self, count, crosses=True), self.float8)

    def mix_here(self, x: torch.Tensor, order: ExpertOrder, weights: torch.Tensor) -> torch.Tensor:
        """The forward where all experts are here, and tokens are sorted already."""
        stacks = self._weights.stacks(self, len(order.ends))
        return self._how.mixed(self, x, order, weights, stacks, self.float8)


def routed(layer: ExpertLayer, *values: Any) -> torch.Tensor:
    """Sums each token's experts by their weights; indices that name no expert are dropped.

    Args: values  tokens (..., D), and indices and weights (tokens, k) in either order.
    """
    x, indices, weights = _in_roles(values)
    k = indices.shape[-1]
    out = layer.mix(x.reshape(-1, x.shape[-1]), indices.reshape(-1, k), weights.reshape(-1, k))
    return out.to(x.dtype).view(x.shape)


def presorted(layer: ExpertLayer, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Computes rows that are sorted already: `counts` of each expert; what is left over becomes zeros."""
    ends = counts.cumsum(0).to(torch.int32)
    if layer.exchange is None and layer.capacity is None:
        return layer.compute(x, ends)
    positions = torch.arange(len(x), device=x.device, dtype=torch.int32)
    indices = torch.searchsorted(ends, positions, right=True)[:, None]
    return layer.mix(x, indices, x.new_ones(()).expand(len(x), 1))


def batched(layer: ExpertLayer, *values: Any) -> torch.Tensor:
    """Computes rows that are sorted already, as many of each expert; with indices and weights as well, as `routed`."""
    if len(values) == 3:
        return routed(layer, *values)
    (x,) = values
    rows, num_experts = x.reshape(-1, x.shape[-1]), layer.count_experts()
    counts = torch.full((num_experts,), len(rows) // num_experts, device=x.device)
    return presorted(layer, rows, counts)


def by_inputs(layer: nn.Module, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sums each token's experts, each of which is given the token times its weight: (tokens, D), (tokens, k)."""
    tokens = x[:, None] * weights[..., None].to(x.dtype)
    ones = x.new_ones(()).expand(indices.numel(), 1)
    out: torch.Tensor = layer(tokens.flatten(0, 1), indices.reshape(-1, 1), ones)
    return out.view(tokens.shape).sum(1)


FORWARDS: dict[str, Callable[..., torch.Tensor]] = {"routed": routed, "presorted": presorted, "batched": batched}
"""By how modules of experts are called."""


def _in_roles(values: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, indices and weights."""
    if len(values) == 3 and all(isinstance(value, torch.Tensor) for value in values):
        x, indices, weights = values
        if indices.is_floating_point() and not weights.is_floating_point():
            indices, weights = weights, indices
        if not indices.is_floating_point() and indices.shape == weights.shape:
            return x, indices, weights
    shown = ", ".join(str(tuple(value.shape)) if isinstance(value, torch.Tensor) else str(value) for value in values)
    raise ShapeError(
        "experts",
        f"the arguments have shapes {shown}.",
        "Give tokens, and indices and weights of one shape, (tokens, k).",
    )


def class_with(
    module: nn.Module,
    kinds: tuple[type[nn.Module], ...],
    function: Callable[..., Any],
    names: Sequence[str],
    experts: str = "",
    **values: Any,
) -> type[nn.Module]:
    """A class of the same name as the module's, of it and `kinds`, whose forward is `function`.

    Where attributes that the function was found by are others now, the forward is as it was.

    Args: names  of the forward's arguments, in the function's order;  experts  the name of the layer of experts in the
          module, where it is none itself;  values  attributes of the class.
    """
    base: Any = type(module)
    return _class_of(base, kinds, function, tuple(names), experts, Assumed.of(module), tuple(values.items()))


@cache
def _class_of(
    base: Any,
    kinds: tuple[type[nn.Module], ...],
    function: Callable[..., Any],
    names: tuple[str, ...],
    experts: str,
    assumed: Assumed,
    values: tuple[tuple[str, Any], ...],
) -> type[nn.Module]:
    as_ever: Any = base.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not assumed.holds(self):
            layer = getattr(self, experts) if experts else self
            if getattr(layer, "exchange", None) is None and getattr(layer, "hidden_cut", None) is None:
                return as_ever(self, *args, **kwargs)
            raise ShardingError(
                "experts",
                f"attributes of {base.__name__} are others than when use_experts found what it computes, and its"
                " experts are divided.",
                "Change activations, limits and dropout before use_experts.",
                rank=layer.exchange.group.world.rank if getattr(layer, "exchange", None) else None,
            )
        return function(self, *args, *(kwargs[name] for name in names[len(args) :] if name in kwargs))

    # To Dynamo, which counts graphs by code, other classes' are none of this one's.
    forward.__code__ = forward.__code__.replace()
    forward._has_kernels = True  # type: ignore[attr-defined]  # to use_kernels, which leaves it
    described = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    shown = {"forward": wraps(as_ever, updated=())(forward), **described, **dict(values)}
    kind = type(base.__name__, (*kinds, base), shown)
    return made_by(kind, _class_of, base, kinds, function, names, experts, assumed, values)
