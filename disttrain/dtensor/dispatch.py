"""What happens when torch calls an operator on DTensors: plan it from specs alone, then run it on the local parts.

An operator of a known family gets a plan by propagation. One without a rule runs on whole tensors, which is right for
every operator but moves bytes, and says so once. Views, whose result would have to share memory with a part of the
operand, need a rule.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from disttrain.dtensor import foreach
from disttrain.dtensor._torch import OpFacts, OpOverload, facts_of
from disttrain.dtensor.layout import Layout, Spec
from disttrain.dtensor.propagate import Propagation, propagate
from disttrain.dtensor.redistribute import redistribute_local
from disttrain.dtensor.rules import OpCall, find_rule
from disttrain.errors import LayoutError

Wrap = Callable[[torch.Tensor, Spec], torch.Tensor]
"""Makes a DTensor of a local part and a spec."""

facts = cache(facts_of)


def dispatch(wrap: Wrap, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `op` on arguments of which some are DTensors; results are DTensors, but for values that are no tensors."""
    op_facts = facts(op)
    if op_facts.name.startswith(("aten._foreach_", "aten._fused_")):
        return foreach.run(wrap, op, op_facts, args, kwargs)
    tensors = _tensors_of([*args, *kwargs.values()])
    if _are_scalars_among_plain(op_facts, tensors):
        values = [tensor if _is_plain(tensor) else _value_of(tensor) for tensor in tensors]
        plain_args, plain_kwargs = _replaced(args, kwargs, values)
        return op(*plain_args, **plain_kwargs)
    specs = tuple(_spec_of(op_facts, tensor) for tensor in tensors)
    call = OpCall(op_facts, args, kwargs, specs, ())
    if _can_be_planned(op_facts):
        outputs = _global_outputs(op, args, kwargs)
        if isinstance(outputs, torch.Tensor):
            call = OpCall(op_facts, args, kwargs, specs, tuple(outputs.shape))
            propagation = _plan(call)
            if propagation is not None:
                return _run_planned(wrap, op, call, propagation, tensors, outputs)
    return _run_whole(wrap, op, call, tensors)


def _are_scalars_among_plain(op_facts: OpFacts, tensors: Sequence[torch.Tensor]) -> bool:
    """True where a plain tensor, say a gradient, meets scalar DTensors, say a norm: each is its value to the other."""
    if not any(tensor.ndim > 0 and _is_plain(tensor) for tensor in tensors):
        return False
    is_written_to = bool(op_facts.mutated) and not _is_plain(tensors[0])
    return not is_written_to and all(_is_plain(tensor) or tensor.ndim == 0 for tensor in tensors)


def _is_plain(tensor: torch.Tensor) -> bool:
    return not hasattr(tensor, "_spec")


def _value_of(tensor: torch.Tensor) -> torch.Tensor:
    spec: Spec = tensor._spec  # type: ignore[attr-defined]
    return redistribute_local(_local_of(tensor), spec, spec.layout.replicated())


def _can_be_planned(op_facts: OpFacts) -> bool:
    """False when specs alone don't say what comes out, and for `out=`, whose layout is the caller's."""
    writes_elsewhere = bool(op_facts.mutated) and not op_facts.is_inplace
    return not (op_facts.returns_data or op_facts.shape_depends_on_values or writes_elsewhere)


def _plan(call: OpCall) -> Propagation | None:
    rule = find_rule(call)
    if rule is None:
        return None
    propagation = propagate(call, rule(call))
    if propagation is None:
        spec = call.operands[0]
        assert spec is not None
        raise LayoutError(
            call.facts.name,
            f"the result would not lie as {spec.layout}, where it is to be written.",
            "Redistribute the tensor to Replicate() or Shard(dim) first, or use the operator that is not in place.",
            rank=spec.mesh.world.rank,
        )
    return propagation


def _run_planned(
    wrap: Wrap,
    op: OpOverload,
    call: OpCall,
    propagation: Propagation,
    tensors: Sequence[torch.Tensor],
    outputs: torch.Tensor,
) -> torch.Tensor:
    locals_ = [
        tensor if spec is None or layout is None else redistribute_local(_local_of(tensor), spec, layout)
        for tensor, spec, layout in zip(tensors, call.operands, propagation.operands, strict=True)
    ]
    args, kwargs = _replaced(call.arguments, call.keywords, locals_)
    result = op(*args, **kwargs)
    if call.facts.is_inplace:
        return tensors[0]
    return wrap(result, Spec(propagation.result, tuple(outputs.shape), tuple(outputs.stride()), result.dtype))


def _run_whole(wrap: Wrap, op: OpOverload, call: OpCall, tensors: Sequence[torch.Tensor]) -> Any:
    """Gather all operands, compute on every rank, keep the whole; what is written to goes back to its own layout."""
    specs = [spec for spec in call.operands if spec is not None]
    layout = specs[0].layout.replicated()
    if not all(spec.layout.is_replicated for spec in specs):
        _check_may_be_whole(call, specs)
    # A random in-place operator ignores what was there: nothing needs to be gathered for it.
    overwrites = call.facts.is_random and call.facts.is_inplace
    wholes = [
        tensor if spec is None else _whole(tensor, spec, skips_values=overwrites and place == 0)
        for place, (tensor, spec) in enumerate(zip(tensors, call.operands, strict=True))
    ]
    args, kwargs = _replaced(call.arguments, call.keywords, wholes)
    result = op(*args, **kwargs)
    replaced: dict[int, torch.Tensor] = {}
    if call.facts.mutated:
        for tensor, spec, whole in zip(tensors, call.operands, wholes, strict=True):
            replaced[id(whole)] = tensor
            if spec is not None:
                part = redistribute_local(whole, spec.with_layout(layout), spec.layout)
                if part is not _local_of(tensor):
                    _local_of(tensor).copy_(part)
    return _wrapped_wholes(wrap, result, layout, replaced)


def _whole(tensor: torch.Tensor, spec: Spec, *, skips_values: bool) -> torch.Tensor:
    local = _local_of(tensor)
    if skips_values and not spec.layout.is_replicated:
        return local.new_empty(spec.shape)
    return redistribute_local(local, spec, spec.layout.replicated())


def _check_may_be_whole(call: OpCall, specs: Sequence[Spec]) -> None:
    if call.facts.is_view:
        raise LayoutError(
            call.facts.name,
            f"a view of a tensor that lies as {specs[0].layout} has no sharding rule.",
            "Redistribute to Replicate() first, or work on to_local().",
            rank=specs[0].mesh.world.rank,
        )
    if not (call.facts.is_random or call.facts.returns_data):
        warnings.warn(
            f"disttrain.dtensor: {call.facts.name} has no sharding rule; its operands are gathered on every rank",
            stacklevel=2,
        )


def _wrapped_wholes(wrap: Wrap, result: Any, layout: Layout, replaced: dict[int, torch.Tensor]) -> Any:
    if isinstance(result, torch.Tensor):
        if id(result) in replaced:
            return replaced[id(result)]
        return wrap(result, Spec(layout, tuple(result.shape), tuple(result.stride()), result.dtype))
    if isinstance(result, list | tuple):
        return type(result)(_wrapped_wholes(wrap, item, layout, replaced) for item in result)
    return result


def _global_outputs(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `op` returns for tensors of the global shapes, on the meta device."""
    metas = [_meta(tensor) for tensor in _tensors_of([*args, *kwargs.values()])]
    meta_args, meta_kwargs = _replaced(args, kwargs, metas)
    if meta_kwargs.get("device") is not None:
        meta_kwargs["device"] = torch.device("meta")
    meta_kwargs.pop("pin_memory", None)
    meta_kwargs.pop("generator", None)
    return op(*meta_args, **meta_kwargs)


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _local_of(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return local


def _spec_of(op_facts: OpFacts, tensor: torch.Tensor) -> Spec | None:
    """The spec of a DTensor, None for a plain scalar tensor; any other plain tensor has no layout."""
    spec: Spec | None = getattr(tensor, "_spec", None)
    if spec is None and tensor.ndim > 0:
        raise LayoutError(
            op_facts.name,
            f"a DTensor meets a plain tensor of shape {tuple(tensor.shape)}, whose layout is unknown.",
            "Make it a DTensor with distribute_tensor or DTensor.from_local, or use to_local() of the other.",
        )
    return spec


def _tensors_of(values: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors among the values and in their lists, in order."""
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors.extend(item for item in value if isinstance(item, torch.Tensor))
    return tensors


def _replaced(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with their tensors, in the order of `_tensors_of`, replaced by `tensors`."""
    supply = iter(tensors)

    def replace(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return next(supply)
        if isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor) for item in value):
            return [next(supply) if isinstance(item, torch.Tensor) else item for item in value]
        return value

    return [replace(value) for value in args], {name: replace(value) for name, value in kwargs.items()}
