"""DTensors that are none of ours: torch's, whose class has the name of ours, are told apart before they meet ours."""

from __future__ import annotations

import torch

from disttrain.dtensor.spec.layout import Spec
from disttrain.errors import LayoutError


def is_foreign(tensor: object) -> bool:
    """True for torch's DTensor, and the like."""
    return type(getattr(tensor, "_spec", None)) not in (Spec, type(None)) and isinstance(tensor, torch.Tensor)


def check_ours(operation: str, what: str, *tensors: object) -> None:
    """Raise LayoutError where one of `tensors`, which together are `what`, is a DTensor and not ours."""
    for tensor in tensors:
        if is_foreign(tensor):
            kind = type(tensor)
            raise LayoutError(
                operation,
                f"{what} is a {kind.__module__}.{kind.__qualname__}, which is none of disttrain's.",
                "Take its full_tensor() and give that to disttrain.dtensor.distribute_tensor, or its to_local() to "
                "DTensor.from_local; or make it by disttrain from the start.",
            )
