"""`_foreach_` and `_fused_` operators: one call on the lists of local parts.

An optimizer calls them on the same hundreds of tensors in every step. Lists that lie as the first one does are known by
one comparison of lists, and unwrapped without a look at each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

import torch

from disttrain.dtensor._torch import OpFacts, OpOverload, binding_of, handle_of
from disttrain.dtensor.redistribute.local import redistribute_local
from disttrain.dtensor.redistribute.many import Move, Moves
from disttrain.dtensor.spec.layout import Layout, Spec
from disttrain.dtensor.spec.placement import NormPartial, Placement
from disttrain.dtensor.views.view_copy import count_writes
from disttrain.errors import LayoutError

_local_of: Final = attrgetter("_local_tensor")
_spec_of: Final = attrgetter("_spec")
_NORM: Final = torch.ops.aten._foreach_norm.Scalar
_OTHER_SIGNATURES: Final = frozenset({"addcdiv_", "addcmul_"})
"""Operators whose form for one tensor takes the scalar by keyword."""

Wrap = Callable[[torch.Tensor, Spec], torch.Tensor]


def is_of_lists(facts: OpFacts, args: Sequence[Any]) -> bool:
    """True for a call on lists of tensors; `_fused_rms_norm` and the like are operators as others are."""
    return type(args[0] if args else None) is list and facts.name.startswith(("aten._foreach_", "aten._fused_"))


def run_known(wrap: Wrap, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As `run`, where `op` has been run on such lists before and nothing moves; else MOVES, and nothing is done."""
    specs = _specs_of(args[0])
    known: _Known | None = None if specs is None else specs[0].plans.get(_key(op, specs, args, kwargs))
    if known is None or specs is None:
        return MOVES
    local_args = [[*map(_local_of, args[0])], *[_unwrapped(value, specs) for value in args[1:]]]
    local_kwargs = {name: _unwrapped(value, specs) for name, value in kwargs.items()}
    if any(value is MOVES for value in (*local_args, *local_kwargs.values())):
        return MOVES
    results = known.compute(*local_args, **local_kwargs)
    if known.written:
        _count(known.written, args, kwargs)
        return None
    if known.norms is not None:
        return [*map(wrap, results, known.norms)]
    return _wrapped(wrap, results, specs)


def run(wrap: Wrap, op: OpOverload, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `op` on the local parts: element for element, every list follows the layouts of the first one.

    Results lie as the first list does, but for norms, whose sharded axes become partial.
    """
    if facts.mutated and any(_is_partial(tensor) for tensor in args[0]):
        if _can_go_one_by_one(facts):
            return _one_by_one(facts, args, kwargs)
        if facts.name.startswith("aten._foreach_"):
            return _by_copies(op, facts, args, kwargs)
    leaders = [_leader(facts, tensor) for tensor in args[0]]
    local_args = [_localized(facts, value, leaders) for value in args]
    local_kwargs = {name: _localized(facts, value, leaders) for name, value in kwargs.items()}
    specs = _specs_of(args[0])
    may_be_known = specs is not None and specs == leaders and not any(spec.is_symbolic for spec in specs)
    if facts.name == "aten._foreach_norm":
        norms = _norms(wrap, local_args, local_kwargs, leaders)
        if specs is not None and may_be_known and all(part.numel() for part in local_args[0]):
            norm_specs = [norm._spec for norm in norms]  # type: ignore[attr-defined]
            known = _Known(binding_of(op), (), norm_specs)
            specs[0].plans[_key(op, specs, args, kwargs)] = known
        return norms
    results = op(*local_args, **local_kwargs)
    if not facts.mutated:
        _check_shapes(facts, results, leaders)
    written = _written_lists(facts, args)
    if specs is not None and may_be_known:
        specs[0].plans[_key(op, specs, args, kwargs)] = _Known(binding_of(op), written)
    if facts.mutated:
        _write_back(facts, args, local_args, leaders)
        _count(written, args, kwargs)
        return None
    return [
        part if spec is None else wrap(part, Spec(spec.layout, spec.shape, spec.stride, part.dtype))
        for part, spec in zip(results, leaders, strict=True)
    ]


class _Known(NamedTuple):
    """First lists of some specs need no look at each: nothing of them is partial."""

    compute: Callable[..., Any]
    written: tuple[int, ...]
    """The positions of lists that are written to."""
    norms: list[Spec] | None = None
    """The results' specs, where the operator computes norms."""


def _key(op: OpOverload, specs: Sequence[Spec], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What lists are known under; the order and dtype of norms say how they lie."""
    handle = handle_of(op)
    return (handle, *specs) if op is not _NORM else (handle, *specs, *args[1:], *kwargs.items())


MOVES: Final = object()
"""Stands for a list that does not lie as the first one does, and for the result of a call with one."""


def _specs_of(tensors: Sequence[Any]) -> list[Spec] | None:
    """The specs of a list of DTensors; None where there is a plain tensor among them, or none at all."""
    try:
        return [*map(_spec_of, tensors)] or None
    except AttributeError:
        return None


def _unwrapped(value: Any, specs: list[Spec]) -> Any:
    """The parts of a list that lies as `specs` say; plain scalars and what is no tensor as they are; else MOVES."""
    if isinstance(value, torch.Tensor):
        spec = getattr(value, "_spec", None)
        if spec is None:
            return value
        is_known = spec.layout.is_replicated and spec.view_copy is None
        return value._local_tensor if is_known else MOVES  # type: ignore[attr-defined]
    if not isinstance(value, list | tuple) or not value or not isinstance(value[0], torch.Tensor):
        return value
    if _specs_of(value) == specs:
        return [*map(_local_of, value)]
    return value if all(tensor.ndim == 0 and not hasattr(tensor, "_spec") for tensor in value) else MOVES


def _wrapped(wrap: Wrap, results: Sequence[torch.Tensor], specs: Sequence[Spec]) -> list[torch.Tensor]:
    return [
        wrap(part, spec if part.dtype is spec.dtype else Spec(spec.layout, spec.shape, spec.stride, part.dtype))
        for part, spec in zip(results, specs, strict=True)
    ]


def _check_shapes(facts: OpFacts, results: Sequence[torch.Tensor], leaders: Sequence[Spec | None]) -> None:
    for part, spec in zip(results, leaders, strict=True):
        if spec is not None and tuple(part.shape) != spec.local_shape:
            raise LayoutError(
                facts.name,
                "it does not work element by element, and has no sharding rule.",
                "Call the operator for one tensor on each of them.",
                rank=spec.mesh.world.rank,
            )


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


def _is_partial(tensor: torch.Tensor) -> bool:
    spec: Spec | None = getattr(tensor, "_spec", None)
    return spec is not None and spec.layout.has_partial


def _can_go_one_by_one(facts: OpFacts) -> bool:
    name = _name_for_one(facts)
    return name not in _OTHER_SIGNATURES and hasattr(torch.ops.aten, name)


def _one_by_one(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The operator for one tensor, on each: it knows what may be done to a partial one."""
    op = getattr(torch.ops.aten, _name_for_one(facts))
    for place in range(len(args[0])):
        op(*[value[place] if isinstance(value, list | tuple) else value for value in args], **kwargs)
        count_writes(args[0][place : place + 1])


def _by_copies(op: OpOverload, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The operator that writes to nothing, and copies of its results: a copy knows how to write to a partial one."""
    functional = getattr(getattr(torch.ops.aten, facts.name.removeprefix("aten.").removesuffix("_")), op._overloadname)
    for tensor, result in zip(args[0], functional(*args, **kwargs), strict=True):
        torch.ops.aten.copy_(tensor, result)
    count_writes(args[0])


def _name_for_one(facts: OpFacts) -> str:
    return facts.name.removeprefix("aten._foreach_")


def _localized(facts: OpFacts, value: Any, leaders: Sequence[Spec | None]) -> Any:
    if isinstance(value, torch.Tensor):
        spec = getattr(value, "_spec", None)
        return value if spec is None else _local(value, spec.layout.replicated())
    if not isinstance(value, list | tuple) or not any(isinstance(item, torch.Tensor) for item in value):
        return value
    moves: list[Move] = []
    for place, (tensor, leader) in enumerate(zip(value, leaders, strict=True)):
        own: Spec | None = getattr(tensor, "_spec", None)
        layout = _layout_of_element(facts, tensor, own, leader)
        if own is not None and layout is not None and own.layout is not layout:
            moves.append((place, own, layout))
    parts: list[Any] = [getattr(tensor, "_local_tensor", tensor) for tensor in value]
    Moves(moves).run(parts)
    return parts


def _layout_of_element(facts: OpFacts, tensor: torch.Tensor, spec: Spec | None, leader: Spec | None) -> Layout | None:
    if spec is None or leader is None:
        if spec is None and (leader is None or tensor.ndim == 0):
            return None
        raise LayoutError(
            facts.name,
            "a DTensor meets a plain tensor at the same place of two lists.",
            "Make both DTensors; an optimizer must be built after the parameters have been sharded.",
        )
    return _wanted(spec, leader)


def _wanted(spec: Spec, leader: Spec) -> Layout:
    # A scalar, such as a step count, has no dim to shard.
    return leader.layout if spec.shape == leader.shape else spec.layout.replicated()


def _written_lists(facts: OpFacts, args: Sequence[Any]) -> tuple[int, ...]:
    """The positions of lists that are always written to; of a fused optimizer's the gradients are not."""
    spared = 1 if facts.name.startswith("aten._fused_") else -1
    return tuple(position for position in facts.mutated if position < len(args) and position != spared)


def _count(written: Sequence[int], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    for position in written:
        count_writes(args[position])
    if kwargs.get("grad_scale") is not None:
        count_writes(args[1])


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
    layouts: dict[Layout, Layout] = {}
    for spec in leaders:
        if spec is not None and spec.layout not in layouts:
            layouts[spec.layout] = _norm_layout(spec, order)
    return [
        norm if spec is None else wrap(norm, Spec.of(layouts[spec.layout], (), norm.dtype))
        for norm, spec in zip(norms, leaders, strict=True)
    ]


def _local_norms(locals_: Sequence[torch.Tensor], order: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Norms of the parts; an empty part, which has no largest element, counts as zero."""
    if order != float("inf") or all(local.numel() for local in locals_):
        return list(torch.ops.aten._foreach_norm.Scalar(locals_, order, dtype))
    padded = [local if local.numel() else local.new_zeros(1) for local in locals_]
    return list(torch.ops.aten._foreach_norm.Scalar(padded, order, dtype))


def _norm_layout(spec: Spec, order: float) -> Layout:
    if order <= 0 and any(placement.cut_dim is not None for placement in spec.placements):
        raise LayoutError(
            "_foreach_norm",
            f"norms of order {order:g} of sharded tensors cannot be put together from their parts.",
            "Use a positive order, or full_tensor().",
            rank=spec.mesh.world.rank,
        )
    placements: list[Placement] = [
        placement if placement.cut_dim is None else NormPartial(order=order) for placement in spec.placements
    ]
    return spec.layout.with_placements(tuple(placements))
