"""`_foreach_` and `_fused_` operators: one call on the lists of local parts.

An optimizer calls them on the same hundreds of tensors in every step. If nothing in a list moves, its parts are taken
out without a check of each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch

from disttrain.dtensor._torch import OpFacts, OpOverload, binding_of
from disttrain.dtensor.dispatch.call_plan import Run, Wrap
from disttrain.dtensor.local_part import local_part
from disttrain.dtensor.redistribute.local import redistribute_local
from disttrain.dtensor.redistribute.many import Move, Moves
from disttrain.dtensor.spec.layout import Layout, Spec
from disttrain.dtensor.spec.placement import NormPartial, Placement
from disttrain.dtensor.views.view_copy import count_writes
from disttrain.errors import LayoutError

NORM: Final = torch.ops.aten._foreach_norm.Scalar
_OTHER_SIGNATURES: Final = frozenset({"addcdiv_", "addcmul_"})
"""Operators whose form for one tensor takes the scalar by keyword."""


def is_of_lists(facts: OpFacts, args: Sequence[Any]) -> bool:
    """True for a call on lists of tensors; `_fused_rms_norm` and the like are operators as others are."""
    return type(args[0] if args else None) is list and facts.name.startswith(("aten._foreach_", "aten._fused_"))


def bind_lists(wrap: Wrap, op: OpOverload, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
    """The closure for all calls on lists of the same specs: element for element, every list follows the layouts of the
    first one.

    Results have the layouts of the first list, except norms, whose sharded axes become partial.
    """
    if facts.mutated and any(_is_partial(tensor) for tensor in args[0]):
        if _can_go_one_by_one(facts):
            return partial(_one_by_one, facts)
        if facts.name.startswith("aten._foreach_"):
            return partial(_by_copies, op, facts)
    leaders = [_leader(facts, tensor) for tensor in args[0]]
    local_args = _Localizers(facts, args, kwargs, leaders)
    if facts.mutated:
        return _writing(binding_of(op), facts, local_args, args, leaders)
    if op is not NORM:
        return _returning(wrap, binding_of(op), facts, local_args, leaders)
    order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    has_empty = not all(getattr(tensor, "_local_tensor", tensor).numel() for tensor in args[0])
    compute = _norms_of_padded if has_empty and order == float("inf") else binding_of(op)
    return _returning(wrap, compute, facts, local_args, _norm_specs(leaders, order))


class _Localizers:
    """Turns each argument of a call into what the operator gets for it on this rank."""

    def __init__(
        self, facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any], leaders: Sequence[Spec | None]
    ) -> None:
        self._of_args = [_localizer(facts, value, leaders) for value in args]
        self._of_kwargs = {name: _localizer(facts, value, leaders) for name, value in kwargs.items()}

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        return (
            [localize(value) for localize, value in zip(self._of_args, args, strict=True)],
            {name: self._of_kwargs[name](value) for name, value in kwargs.items()},
        )


def _localizer(facts: OpFacts, value: Any, leaders: Sequence[Spec | None]) -> Callable[[Any], Any]:
    if isinstance(value, torch.Tensor):
        return _localizer_of_tensor(getattr(value, "_spec", None))
    if not isinstance(value, list | tuple) or not any(isinstance(item, torch.Tensor) for item in value):
        return _as_it_is
    specs = [getattr(tensor, "_spec", None) for tensor in value]
    moves: list[Move] = []
    for index, (tensor, spec, leader) in enumerate(zip(value, specs, leaders, strict=True)):
        layout = _layout_of_element(facts, tensor, spec, leader)
        if spec is not None and layout is not None and spec.layout is not layout:
            moves.append((index, spec, layout))
    if not moves and all(spec is None for spec in specs):
        return _as_it_is
    if not moves and None not in specs:
        return _parts_of
    moving = Moves(moves)

    def moved(tensors: Sequence[Any]) -> list[torch.Tensor]:
        parts = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
        moving.run(parts)
        return parts

    return moved


def _localizer_of_tensor(spec: Spec | None) -> Callable[[Any], Any]:
    if spec is None:
        return _as_it_is
    if spec.layout.is_replicated:
        return local_part
    layout = spec.layout.replicated()
    return lambda tensor: redistribute_local(tensor._local_tensor, spec, layout)


def _as_it_is(value: Any) -> Any:
    return value


def _parts_of(tensors: Sequence[Any]) -> list[torch.Tensor]:
    return [*map(local_part, tensors)]


def _returning(
    wrap: Wrap, compute: Callable[..., Any], facts: OpFacts, localizers: _Localizers, likes: Sequence[Spec | None]
) -> Run:
    """For an operator that writes to nothing, whose results are as `likes` say, but for the dtype."""
    are_wrapped = None not in likes
    specs: list[Any] = []

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        local_args, local_kwargs = localizers.run(args, kwargs)
        results = compute(*local_args, **local_kwargs)
        if not specs:
            specs[:] = _result_specs(facts, results, likes)
        if are_wrapped:
            return [*map(wrap, results, specs)]
        return [part if spec is None else wrap(part, spec) for part, spec in zip(results, specs, strict=True)]

    return run


def _result_specs(facts: OpFacts, results: Sequence[torch.Tensor], likes: Sequence[Spec | None]) -> list[Spec | None]:
    specs: list[Spec | None] = []
    for part, like in zip(results, likes, strict=True):
        if like is not None and tuple(part.shape) != like.local_shape:
            raise LayoutError(
                facts.name,
                "it does not work element by element, and has no sharding rule.",
                "Call the operator for one tensor on each of them.",
                rank=like.mesh.world.rank,
            )
        specs.append(like and Spec(like.layout, like.shape, like.stride, part.dtype))
    return specs


def _writing(
    compute: Callable[..., Any],
    facts: OpFacts,
    localizers: _Localizers,
    args: Sequence[Any],
    leaders: Sequence[Spec | None],
) -> Run:
    """For an operator that writes to lists. A write to a redistributed copy is brought back to the part it was made
    of."""
    written = _written_lists(facts, args)
    moved = [
        (position, index, spec.with_layout(_wanted(spec, leader)), spec.layout)
        for position in facts.mutated
        if 0 <= position < len(args) and isinstance(args[position], list | tuple)
        for index, (tensor, leader) in enumerate(zip(args[position], leaders, strict=False))
        if (spec := getattr(tensor, "_spec", None)) is not None
        if leader is not None and spec.layout is not _wanted(spec, leader)
    ]

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        local_args, local_kwargs = localizers.run(args, kwargs)
        compute(*local_args, **local_kwargs)
        for position, index, spec, layout in moved:
            part = redistribute_local(local_args[position][index], spec, layout)
            args[position][index]._local_tensor.copy_(part)
        for position in written:
            count_writes(args[position])
        if kwargs.get("grad_scale") is not None:
            count_writes(args[1])

    return run


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
    """Calls the operator for one tensor on each: its rule knows what may be done to a partial tensor."""
    op = getattr(torch.ops.aten, _name_for_one(facts))
    for index in range(len(args[0])):
        op(*[value[index] if isinstance(value, list | tuple) else value for value in args], **kwargs)
        count_writes(args[0][index : index + 1])


def _by_copies(op: OpOverload, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Calls the operator that returns new tensors, and copies its results: `copy_` knows how to write to a partial
    tensor."""
    functional = getattr(getattr(torch.ops.aten, facts.name.removeprefix("aten.").removesuffix("_")), op._overloadname)
    for tensor, result in zip(args[0], functional(*args, **kwargs), strict=True):
        torch.ops.aten.copy_(tensor, result)
    count_writes(args[0])


def _name_for_one(facts: OpFacts) -> str:
    return facts.name.removeprefix("aten._foreach_")


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


def _norms_of_padded(parts: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Norms of which an empty part, which has no largest element, counts as zero."""
    return list(NORM([part if part.numel() else part.new_zeros(1) for part in parts], *args, **kwargs))


def _norm_specs(leaders: Sequence[Spec | None], order: float) -> list[Spec | None]:
    layouts: dict[Layout, Layout] = {}
    for spec in leaders:
        if spec is not None and spec.layout not in layouts:
            layouts[spec.layout] = _norm_layout(spec, order)
    return [spec and Spec.of(layouts[spec.layout], (), spec.dtype) for spec in leaders]


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
