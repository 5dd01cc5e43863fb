"""Computes the experts' outputs of rows that are sorted by expert."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from disttrain.experts.crossing import GatedExperts
from disttrain.experts.expert_layer import float8_sizes, without_experts
from disttrain.kernels.grouped.form import GatedForm
from disttrain.kernels.grouped.mlp import ExpertWeights
from disttrain.kernels.grouped.products import GateUp, expert_mlp, grouped_linear, mix_experts
from disttrain.kernels.grouped.rows import ExpertOrder, combine_rows, take_rows


class Stacks(NamedTuple):
    """The weights of a module's experts, stacked along dim 0."""

    into: tuple[torch.Tensor, ...]
    """Gate's and up's, or one tensor of both; or the one of experts without a gate."""
    down: torch.Tensor
    into_bias: tuple[torch.Tensor, ...] = ()
    down_bias: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        """All of them."""
        return [*self.into, self.down, *self.into_bias, *([] if self.down_bias is None else [self.down_bias])]


@dataclass(frozen=True)
class Computation:
    """The computation of an expert, and the layout of its weights.

    Args: gated          the form that one kernel computes; without it, `activation` is called between two products.
          is_transposed  weights are (experts, in, out).
          activation     the module's own function, by name.
          takes          what the function is given: "both", all that the first product gives; "gate", which up then
                         multiplies; "alone", where there is no gate.
          norm           the name of a module that outputs pass before they are weighted.
          is_reversed    up's weight comes before gate's.
    """

    gated: GatedForm | None = None
    is_transposed: bool = False
    activation: str = ""
    takes: str = "both"
    norm: str = ""
    is_reversed: bool = False

    def outputs(
        self, module: nn.Module, rows: torch.Tensor, ends: torch.Tensor, stacks: Stacks, float8: str = ""
    ) -> torch.Tensor:
        """Computes all experts on rows that are sorted by expert; `ends` is the first row after each expert's.

        Args: module  has the functions and norms that are named here;  float8  the recipe of gated forms' products.
        """
        if not len(ends):
            out = without_experts(rows, stacks.tensors())
            return named(module, self.norm)(out) if self.norm else out
        into, bias = self._into(stacks)
        if self.gated is not None:
            biases = {"gate_up_bias": bias, "down_bias": stacks.down_bias}
            out = expert_mlp(rows, ends, into, stacks.down, self.gated, **biases, float8=float8)
        else:
            both = into if isinstance(into, torch.Tensor) else torch.cat(into, 2 if self.is_transposed else 1)
            first = grouped_linear(rows, both, ends, bias, is_transposed=self.is_transposed)
            hidden = self._activated(module, first)
            out = grouped_linear(hidden, stacks.down, ends, stacks.down_bias, is_transposed=self.is_transposed)
        return named(module, self.norm)(out) if self.norm else out

    def mixed(
        self,
        module: nn.Module,
        x: torch.Tensor,
        order: ExpertOrder,
        weights: torch.Tensor,
        stacks: Stacks,
        float8: str = "",
    ) -> torch.Tensor:
        """Computes each token's weighted sum, where all experts are here: in one operator where there is one."""
        if self.gated is None or self.norm:
            rows = self.outputs(module, take_rows(x, order, weights.shape[1]), order.ends, stacks, float8)
            return combine_rows(rows, order, weights)
        into, bias = self._into(stacks)
        biases = {"gate_up_bias": bias, "down_bias": stacks.down_bias}
        return mix_experts(x, order, weights, into, stacks.down, self.gated, **biases, float8=float8)

    def gated_experts(self, stacks: Stacks, float8: str) -> GatedExperts | None:
        """The experts of `stacks`, where they are nothing but gated layers, and there are some."""
        if self.gated is None or self.norm or not len(stacks.down):
            return None
        into, bias = self._into(stacks)
        gate, up = into if isinstance(into, tuple) else (into, None)
        return GatedExperts(ExpertWeights(gate, up, stacks.down, bias, stacks.down_bias), self.gated, float8)

    def float8_obstacle(self, width: int, hidden: int) -> str:
        """Why products of these sizes cannot be in float8; empty where they can."""
        if self.gated is None:
            return "their activation is not one of those that are computed within grouped products"
        return float8_sizes(width, hidden)

    def _into(self, stacks: Stacks) -> tuple[GateUp, torch.Tensor | None]:
        """Gate's and up's weights, in one tensor where they have biases, and those."""
        into, biases = (part[::-1] if self.is_reversed else part for part in (stacks.into, stacks.into_bias))
        if len(into) == 1:
            return into[0], biases[0] if biases else None
        if biases:
            return torch.cat(into, 2 if self.is_transposed else 1), torch.cat(biases, 1)
        gate, up = into
        return (gate, up), None

    def _activated(self, module: nn.Module, first: torch.Tensor) -> torch.Tensor:
        function = FUNCTIONS.get(self.activation) or named(module, self.activation)
        if self.takes != "gate":
            result: torch.Tensor = function(first)
            return result
        gate, up = first.chunk(2, -1)
        return function(gate) * up


def _relu_squared(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


FUNCTIONS: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "F.relu": F.relu,
    "F.gelu": F.gelu,
    "F.silu": F.silu,
    "F.gelu_tanh": _gelu_tanh,
    "F.relu_squared": _relu_squared,
    "F.sigmoid": torch.sigmoid,
}
"""Activations that a forward may call without having them as attributes."""


@dataclass(frozen=True)
class Assumed:
    """Attributes of a module by which its computation was found: plain values, the classes of its children, and the
    plain values of those children that compute without parameters, such as activations and dropout."""

    names: tuple[str, ...]
    children: tuple[tuple[str, tuple[str, ...]], ...]
    values: tuple[Any, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Assumed:
        """As the module has them now."""
        # Linear layers and the experts of lists are looked at where they are computed.
        children = tuple(
            (name, () if any(True for _ in child.parameters()) else _plain_names(child))
            for name, child in module.named_children()
            if not isinstance(child, nn.Linear) and not isinstance(module, nn.ModuleList)
        )
        names = _plain_names(module)
        return cls(names, children, _values(module, names, children))

    def holds(self, module: nn.Module) -> bool:
        """True if the module has them still."""
        return _values(module, self.names, self.children) == self.values


def _plain_names(module: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, value in vars(module).items() if isinstance(value, float | str))


def _values(
    module: nn.Module, names: Sequence[str], children: Sequence[tuple[str, tuple[str, ...]]]
) -> tuple[Any, ...]:
    values = [getattr(module, name, None) for name in names]
    for name, of_child in children:
        child = getattr(module, name, None)
        # By name: modules get other classes of the same names when they are wrapped.
        values += [type(child).__name__, *(getattr(child, each, None) for each in of_child)]
    return tuple(values)


def named(module: Any, path: str) -> Any:
    """Gets what a module, or one of its own, has under a name with dots."""
    for name in path.split("."):
        module = getattr(module, name)
    return module
