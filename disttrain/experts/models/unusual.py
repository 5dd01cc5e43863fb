"""Says what is unusual about modules of experts that are left as they are."""

from __future__ import annotations

from typing import Final

from torch import nn

from disttrain.experts.models.stacked import named_weights

_UNKNOWN: Final = "its parameters have no form that is known"


def what_is_unusual(module: nn.Module) -> str:
    """Why no class is tried for a module that is called experts."""
    if isinstance(module, nn.ModuleDict):
        return "its experts lie in a ModuleDict, and those in ModuleLists are known"
    products = [
        name
        for name, child in module.named_children()
        if any(value.dim() == 3 for value in child.parameters(recurse=False))
    ]
    if len(products) > 1:
        return (
            f"its experts' products are modules of their own, {' and '.join(products)}, with sorted rows between them"
        )
    if all(value.dim() != 3 for value in module.parameters()):
        return f"{_UNKNOWN}: none has a dim of experts beside a product's two"
    shapes = [f"{name} of {tuple(weight.shape)}" for name, weight in named_weights(module)]
    return f"{_UNKNOWN}: {' and '.join(shapes)} are no experts' two products" if shapes else _UNKNOWN


def dropout_in(module: nn.Module) -> str:
    """The dropout that a module has, as a reason not to take it; empty where it has none."""
    rates = sorted({part.p for part in module.modules() if isinstance(part, nn.Dropout) and part.p})
    return f"it has dropout of {', '.join(map(str, rates))}, which no product of all experts computes" if rates else ""
