"""Calls that mix: DTensors with plain tensors, or tensors of several meshes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from disttrain.dtensor._torch import OpFacts
from disttrain.dtensor.dispatch.call_plan import Wrap
from disttrain.dtensor.local_part import spec_of
from disttrain.dtensor.spec.layout import Layout, Spec
from disttrain.dtensor.spec.placement import Replicate
from disttrain.errors import LayoutError
from disttrain.mesh import DeviceMesh


def is_plain(tensor: torch.Tensor) -> bool:
    return not hasattr(tensor, "_spec")


def mesh_of(tensors: Sequence[torch.Tensor]) -> DeviceMesh:
    """The mesh of the first DTensor among the tensors."""
    return next(spec_of(tensor).mesh for tensor in tensors if not is_plain(tensor))


def are_scalars_apart(tensors: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> bool:
    """True where all DTensors are scalars that stand for their values, and nothing else that is written to.

    That is so when a plain tensor, say a gradient, is among the operands, and when they are on several meshes, as norms
    of parameters may be.
    """
    if not all(is_plain(tensor) for tensor in written):
        return False
    if not all(is_plain(tensor) or tensor.ndim == 0 for tensor in tensors):
        return False
    return any(tensor.ndim > 0 and is_plain(tensor) for tensor in tensors) or len(_meshes_of(tensors)) > 1


def _meshes_of(tensors: Sequence[torch.Tensor]) -> set[DeviceMesh]:
    return {spec_of(tensor).mesh for tensor in tensors if not is_plain(tensor)}


def specs_of(
    facts: OpFacts, tensors: Sequence[torch.Tensor], written: Sequence[torch.Tensor]
) -> tuple[Spec | None, ...] | None:
    """Each DTensor's spec, None for a plain scalar and for a plain `out=`, which gets the whole result.

    None if there is any other plain tensor, since it has no layout. An operator that is not pointwise, such as
    `scatter`, takes no scalar for the tensor that it works on.
    """
    specs: list[Spec | None] = [getattr(tensor, "_spec", None) for tensor in tensors]
    meshes = _meshes_of(tensors)
    if len(meshes) > 1:
        layouts = sorted(str(mesh.layout) for mesh in meshes)
        groups = " with groups of their own" if len(set(layouts)) < len(layouts) else ""
        raise LayoutError(
            facts.name,
            f"its operands lie on {len(meshes)} meshes{groups}: {', '.join(layouts)}.",
            "Bring them to one mesh: full_tensor(), then distribute_tensor().",
            rank=mesh_of(tensors).world.rank,
        )
    outs = {id(tensor) for tensor in written} if -1 in facts.mutated else set()
    if any(
        spec is None and id(tensor) not in outs and _needs_layout(facts, tensor, index)
        for index, (spec, tensor) in enumerate(zip(specs, tensors, strict=True))
    ):
        return None
    return tuple(specs)


def _needs_layout(facts: OpFacts, tensor: torch.Tensor, index: int) -> bool:
    return tensor.ndim > 0 or (index == 0 and not facts.is_pointwise)


def has_small_ones_only(tensors: Sequence[torch.Tensor]) -> bool:
    """True when each plain tensor has one element at most, expanded or not, as a number has, or no values at all."""
    return all(_is_small(tensor) for tensor in tensors if is_plain(tensor))


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() < 2 or tensor.is_meta or not any(tensor.stride())


_OF_STATE: Final = (
    "A whole state dict is loaded by checkpoint.set_model_state_dict(model, state, "
    "options=StateDictOptions(full_state_dict=True))."
)
_OF_PARAMETERS: Final = (
    "Parameters that fully_shard has sharded are whole within their module's forward, and within methods that "
    "register_fsdp_forward_method is told of."
)


def meets_plain(facts: OpFacts, tensors: Sequence[torch.Tensor]) -> LayoutError:
    """The error for plain tensors beside DTensors."""
    if facts.name.startswith("fsdp."):
        return LayoutError(
            facts.name,
            "torch's fully_shard computes with a parameter that disttrain has sharded.",
            "Take fully_shard from disttrain.fsdp2 for all modules of a model, or from torch for all.",
            rank=mesh_of(tensors).world.rank,
        )
    shape = max((tuple(tensor.shape) for tensor in tensors if is_plain(tensor)), key=len)
    return LayoutError(
        facts.name,
        f"a DTensor meets a plain tensor of shape {shape}, whose layout is unknown.",
        "Make it a DTensor with distribute_tensor or DTensor.from_local, use to_local() of the other, or, where all "
        "ranks have the same one, enter implicit_replication(). "
        + (_OF_STATE if facts.name == "aten.copy_" else _OF_PARAMETERS),
        rank=mesh_of(tensors).world.rank,
    )


def as_replicated(
    wrap: Wrap, facts: OpFacts, written: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The tensors with DTensors, whole on every rank, in place of the plain ones, which all ranks have alike.

    Raises LayoutError where a plain one is among those `written` to: the caller would go on with it.
    """
    mesh = mesh_of(tensors)
    if -1 not in facts.mutated and any(is_plain(tensor) for tensor in written):
        raise meets_plain(facts, tensors)
    layout = Layout(mesh, (Replicate(),) * mesh.ndim)
    return [
        wrap(tensor, Spec(layout, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype))
        if is_plain(tensor) and _needs_layout(facts, tensor, index) and all(tensor is not item for item in written)
        else tensor
        for index, tensor in enumerate(tensors)
    ]
