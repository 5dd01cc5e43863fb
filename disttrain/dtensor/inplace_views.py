"""Operators that change a tensor's shape in place: `t_`, `squeeze_`, and the like.

A DTensor's shape is that of its wrapper, so the view is made as any other and the tensor becomes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from disttrain.dtensor._torch import OpFacts, OpOverload, become, functional_twin
from disttrain.dtensor.layout import Spec
from disttrain.errors import LayoutError


def run_inplace_view(
    run: Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any],
    op: OpOverload,
    facts: OpFacts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Make the tensor `args[0]` what the operator makes of it; `run(op, args, kwargs)` runs one on DTensors."""
    tensor = args[0]
    spec: Spec | None = getattr(tensor, "_spec", None)
    if spec is not None and _keeps_shape(facts, spec, args):
        return tensor
    twin = functional_twin(op)
    if spec is None or twin is None:
        raise LayoutError(
            facts.name,
            "it would give a DTensor other memory, or a plain tensor a DTensor's.",
            "Make a new tensor of the new shape.",
        )
    view = run(twin, args, kwargs)
    if view._spec.is_copied_view:
        raise LayoutError(
            facts.name,
            f"a tensor that lies as {spec.layout} cannot take the shape {view._spec.shape} in its own memory.",
            "Take the view that is not in place, or redistribute to Replicate() first.",
            rank=spec.mesh.world.rank,
        )
    become(tensor, view)
    tensor._local_tensor, tensor._spec = view._local_tensor, view._spec
    return tensor


def _keeps_shape(facts: OpFacts, spec: Spec, args: tuple[Any, ...]) -> bool:
    """True for a resize to the size that the tensor has."""
    match facts.name:
        case "aten.resize_":
            return tuple(args[1]) == spec.shape
        case "aten.resize_as_":
            return tuple(args[1].shape) == spec.shape
    return False
