"""How rows that are sorted by expert become the experts' outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from disttrain.kernels.grouped.form import GatedForm
from disttrain.kernels.grouped.products import expert_mlp, grouped_linear


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
    """What an expert computes, and how its weights lie.

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

    def outputs(self, module: nn.Module, rows: torch.Tensor, ends: torch.Tensor, stacks: Stacks) -> torch.Tensor:
        """Computes all experts on rows that are sorted by expert; `ends` is the first row after each expert's.

        Args: module  has the functions and norms that are named here.
        """
        if not len(ends):
            # A rank without experts has a backward all the same: the others exchange rows with it.
            return rows + sum((part.sum() for part in stacks.tensors()), rows.new_zeros(()))
        into = stacks.into[::-1] if self.is_reversed else stacks.into
        biases = stacks.into_bias[::-1] if self.is_reversed else stacks.into_bias
        if len(into) == 2 and (biases or self.gated is None):
            dim = 2 if self.is_transposed else 1
            into, biases = (torch.cat(into, dim),), (torch.cat(biases, 1),) if biases else ()
        bias = biases[0] if biases else None
        if self.gated is not None:
            both: Any = into if len(into) == 2 else into[0]
            out = expert_mlp(rows, ends, both, stacks.down, self.gated, gate_up_bias=bias, down_bias=stacks.down_bias)
        else:
            first = grouped_linear(rows, into[0], ends, bias, is_transposed=self.is_transposed)
            hidden = self._activated(module, first)
            out = grouped_linear(hidden, stacks.down, ends, stacks.down_bias, is_transposed=self.is_transposed)
        return named(module, self.norm)(out) if self.norm else out

    def _activated(self, module: nn.Module, first: torch.Tensor) -> torch.Tensor:
        function = FUNCTIONS.get(self.activation) or named(module, self.activation)
        if self.takes != "gate":
            result: torch.Tensor = function(first)
            return result
        gate, up = first.chunk(2, -1)
        return function(gate) * up  # type: ignore[no-any-return]


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


def named(module: Any, path: str) -> Any:
    """What a module, or one of its own, has under a name with dots."""
    for name in path.split("."):
        module = getattr(module, name)
    return module
