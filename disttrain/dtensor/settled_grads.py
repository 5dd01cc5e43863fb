"""Gradients of parameters, laid out as their parameters are once they have come.

The gradient of a replicated parameter comes as each rank's term of a sum. Every operator that reads it would reduce it
anew, and clipping and optimizers call several.
"""

from __future__ import annotations

import copy
from typing import Any, Self, cast

import torch
from torch import nn

from disttrain.dtensor.checked_layouts import gradient_placements
from disttrain.dtensor.layout import Spec


class AsParameter:
    """The part of DTensor that parameters need."""

    is_leaf: bool
    requires_grad: bool

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """As of a tensor; gradients that a parameter accumulates from now on lie as it does itself."""
        super().requires_grad_(requires_grad)  # type: ignore[misc]
        if requires_grad and self.is_leaf and not vars(self).get("_settles"):
            cast(Any, self).register_post_accumulate_grad_hook(settle_gradient)
            vars(self)["_settles"] = True
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """As torch copies parameters: without their gradients and hooks."""
        if not isinstance(self, nn.Parameter):
            return super().__deepcopy__(memo)  # type: ignore[misc]
        if id(self) not in memo:
            twin = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
            own = vars(twin)
            others = {name: value for name, value in vars(self).items() if name not in own and name != "_settles"}
            own.update(copy.deepcopy(others, memo))
        return memo[id(self)]


def settle_gradient(leaf: Any) -> None:
    """Bring the gradient that a parameter has accumulated to lie as it does. Collective where something moves.

    Other leaves keep their gradients as they come, as torch's DTensor does for all.
    """
    if isinstance(leaf, nn.Parameter):
        _settle(leaf)


def _settle(parameter: Any) -> None:
    grad = parameter.grad
    own: Spec = parameter._spec
    if getattr(grad, "_spec", None) is own:
        return
    wanted = own.layout.with_placements(gradient_placements(parameter.placements))
    spec = getattr(grad, "_spec", None)
    if spec is not None and spec.layout is not wanted:
        with torch.no_grad():
            parameter.grad = grad.redistribute(placements=wanted.placements)
