"""Gradients of parameters, laid out as their parameters are once they have come.

The gradient of a replicated parameter comes as each rank's term of a sum. Every operator that reads it would reduce it
anew, and clipping and optimizers call several.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from disttrain.dtensor.checked_layouts import gradient_placements
from disttrain.dtensor.layout import Spec


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
