"""Operators on whole tensors: right for all of them, at the price of gathering every operand on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from disttrain.dtensor._torch import OpOverload
from disttrain.dtensor.call_plan import Wrap, replaced
from disttrain.dtensor.copied_views import as_copied_views, version_of
from disttrain.dtensor.layout import Layout, Spec
from disttrain.dtensor.redistribute import redistribute_local
from disttrain.dtensor.rules import OpCall


def whole_of(tensor: Any) -> torch.Tensor:
    """The global value of a DTensor. Collective over its mesh."""
    spec: Spec = tensor._spec
    return redistribute_local(tensor._local_tensor, spec, spec.layout.replicated())


def run_whole(wrap: Wrap, op: OpOverload, call: OpCall, tensors: Sequence[Any]) -> Any:
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
    args, kwargs = replaced(call.arguments, call.keywords, wholes)
    result = op(*args, **kwargs)
    if call.facts.is_view and not specs[0].layout.is_replicated:
        result = _wrapped_wholes(wrap, result, layout, {})
        return as_copied_views(wrap, result, version_of(tensors[0]))
    stand_ins: dict[int, torch.Tensor] = {}
    if call.facts.mutated:
        for tensor, spec, whole in zip(tensors, call.operands, wholes, strict=True):
            stand_ins[id(whole)] = tensor
            if spec is not None:
                part = redistribute_local(whole, spec.with_layout(layout), spec.layout)
                if part is not tensor._local_tensor:
                    tensor._local_tensor.copy_(part)
    return _wrapped_wholes(wrap, result, layout, stand_ins)


def _whole(tensor: Any, spec: Spec, *, skips_values: bool) -> torch.Tensor:
    local: torch.Tensor = tensor._local_tensor
    if skips_values and not spec.layout.is_replicated:
        return local.new_empty(spec.shape)
    return redistribute_local(local, spec, spec.layout.replicated())


def _check_may_be_whole(call: OpCall, specs: Sequence[Spec]) -> None:
    if not (call.facts.is_random or call.facts.returns_data):
        warnings.warn(
            f"disttrain.dtensor: {call.facts.name} has no sharding rule; its operands are gathered on every rank",
            stacklevel=2,
        )


def _wrapped_wholes(wrap: Wrap, result: Any, layout: Layout, stand_ins: dict[int, torch.Tensor]) -> Any:
    if isinstance(result, torch.Tensor):
        if id(result) in stand_ins:
            return stand_ins[id(result)]
        return wrap(result, Spec(layout, tuple(result.shape), tuple(result.stride()), result.dtype))
    if isinstance(result, list | tuple):
        return type(result)(_wrapped_wholes(wrap, item, layout, stand_ins) for item in result)
    return result
