"""`_foreach_` and `_fused_` operators: one call on the lists of local parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from disttrain.dtensor._torch import OpFacts, OpOverload
from disttrain.dtensor.layout import Layout, Spec
from disttrain.dtensor.placement import NormPartial, Placement, Shard
from disttrain.dtensor.redistribute import redistribute_local
from disttrain.errors import LayoutError

Wrap = Callable[[torch.Tensor, Spec], torch.Tensor]


def run(wrap: Wrap, op: OpOverload, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `op` on the local parts: element for element, every list follows the layouts of the first one.

    Results lie as the first list does, but for norms, whose sharded axes become partial.
    """
    leaders = [_leader(facts, tensor) for tensor in args[0]]
    local_args = [_localized(facts, value, leaders) for value in args]
    local_kwargs = {name: _localized(facts, value, leaders) for name, value in kwargs.items()}
    if facts.name == "aten._foreach_norm":
        return _norms(wrap, local_args, local_kwargs, leaders)
    results = op(*local_args, **local_kwargs)
    if facts.mutated:
        _write_back(facts, args, local_args, leaders)
        return None
    for local, spec in zip(results, leaders, strict=True):
        if spec is not None and tuple(local.shape) != spec.local_shape:
            raise LayoutError(
                facts.name,
                "it does not work element by element, and has no sharding rule.",
                "Call the operator for one tensor on each of them.",
                rank=spec.mesh.world.rank,
            )
    return [
        local if spec is None else wrap(local, Spec(spec.layout, spec.shape, spec.stride, local.dtype))
        for local, spec in zip(results, leaders, strict=True)
    ]


def _leader(facts: OpFacts, tensor: torch.Tensor) -> Spec | None:
    """The spec that an element of the other lists must have. What is partial is reduced, unless it is written to."""
    spec: Spec | None = getattr(tensor, "_spec", None)
    if spec is None or not spec.layout.has_partial:
        return spec
    if facts.mutated:
        raise LayoutError(
            facts.name,
            f"a tensor that lies as {spec.layout} cannot be written to element by element.",
            "Redistribute it to Replicate() or Shard(dim) first.",
            rank=spec.mesh.world.rank,
        )
    return spec.with_layout(spec.layout.replicated())


def _localized(facts: OpFacts, value: Any, leaders: Sequence[Spec | None]) -> Any:
    if isinstance(value, torch.Tensor):
        spec = getattr(value, "_spec", None)
        return value if spec is None else _local(value, spec.layout.replicated())
    if not isinstance(value, list | tuple) or not any(isinstance(item, torch.Tensor) for item in value):
        return value
    return [_element(facts, tensor, leader) for tensor, leader in zip(value, leaders, strict=True)]


def _element(facts: OpFacts, tensor: torch.Tensor, leader: Spec | None) -> torch.Tensor:
    spec: Spec | None = getattr(tensor, "_spec", None)
    if spec is None or leader is None:
        if spec is None and (leader is None or tensor.ndim == 0):
            return tensor
        raise LayoutError(
            facts.name,
            "a DTensor meets a plain tensor at the same place of two lists.",
            "Make both DTensors; an optimizer must be built after the parameters have been sharded.",
        )
    return _local(tensor, _wanted(spec, leader))


def _wanted(spec: Spec, leader: Spec) -> Layout:
    # A scalar, such as a step count, has no dim to shard.
    return leader.layout if spec.shape == leader.shape else spec.layout.replicated()


def _write_back(facts: OpFacts, args: Sequence[Any], local_args: Sequence[Any], leaders: Sequence[Spec | None]) -> None:
    """What was written to a redistributed copy goes to the part that it stands for."""
    for position in facts.mutated:
        tensors, written = (args[position], local_args[position]) if 0 <= position < len(args) else ((), ())
        if not isinstance(tensors, list | tuple) or not tensors:
            continue
        for tensor, local, leader in zip(tensors, written, leaders, strict=True):
            spec: Spec | None = getattr(tensor, "_spec", None)
            if spec is not None and leader is not None and local is not tensor._local_tensor:
                used = spec.with_layout(_wanted(spec, leader))
                tensor._local_tensor.copy_(redistribute_local(local, used, spec.layout))


def _local(tensor: Any, layout: Layout) -> torch.Tensor:
    local: torch.Tensor = tensor._local_tensor
    spec: Spec = tensor._spec
    return local if spec.layout is layout else redistribute_local(local, spec, layout)


def _norms(
    wrap: Wrap, args: Sequence[Any], kwargs: dict[str, Any], leaders: Sequence[Spec | None]
) -> list[torch.Tensor]:
    order = float(args[1] if len(args) > 1 else kwargs.pop("ord", 2))
    dtype = kwargs.get("dtype", args[2] if len(args) > 2 else None)
    norms = _local_norms(args[0], order, dtype)
    return [
        norm if spec is None else wrap(norm, Spec.of(_norm_layout(spec, order), (), norm.dtype))
        for norm, spec in zip(norms, leaders, strict=True)
    ]


def _local_norms(locals_: Sequence[torch.Tensor], order: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Norms of the parts; an empty part, which has no largest element, counts as zero."""
    if order != float("inf") or all(local.numel() for local in locals_):
        return list(torch.ops.aten._foreach_norm.Scalar(locals_, order, dtype))
    padded = [local if local.numel() else local.new_zeros(1) for local in locals_]
    return list(torch.ops.aten._foreach_norm.Scalar(padded, order, dtype))


def _norm_layout(spec: Spec, order: float) -> Layout:
    if order <= 0 and any(isinstance(placement, Shard) for placement in spec.placements):
        raise LayoutError(
            "_foreach_norm",
            f"norms of order {order:g} of sharded tensors cannot be put together from their parts.",
            "Use a positive order, or full_tensor().",
            rank=spec.mesh.world.rank,
        )
    placements: list[Placement] = [
        NormPartial(order=order) if isinstance(placement, Shard) else placement for placement in spec.placements
    ]
    return spec.layout.with_placements(tuple(placements))
