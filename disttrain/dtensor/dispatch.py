"""What happens when torch calls an operator on DTensors: plan it from specs alone, then run it on the local parts.

The first call with given specs and arguments is planned: a rule of the operator's family, a layout for each operand, a
closure. Calls like it find the closure under their first operand's spec. An operator without a rule runs on whole
tensors, which is right for every operator but moves bytes, and says so once. Views, whose result would have to share
memory with a part of the operand, need a rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch

from disttrain.dtensor import foreach
from disttrain.dtensor._torch import OpFacts, OpOverload, facts_of, is_called_by_autograd
from disttrain.dtensor.call_plan import Run, Wrap, bind, replaced, tensors_of
from disttrain.dtensor.copied_views import as_copied_views, is_copied_view, run_on_copied_views, version_of
from disttrain.dtensor.inplace_views import run_inplace_view
from disttrain.dtensor.layout import Spec
from disttrain.dtensor.mixed import (
    are_scalars_among_plain,
    as_replicated,
    has_small_ones_only,
    is_plain,
    meets_plain,
    specs_of,
)
from disttrain.dtensor.propagate import propagate
from disttrain.dtensor.replication import is_replication_implicit
from disttrain.dtensor.rules import OpCall, Rule, find_rule
from disttrain.dtensor.whole import run_whole, whole_of, written_tensors

MAX_PLANS = 4096
"""Closures kept for one first operand's spec; past it, all are forgotten."""

facts = cache(facts_of)

_BY_VALUE = frozenset({int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})


_MATERIALIZED = {
    torch.ops.aten._conj.default: torch.ops.aten.conj_physical.default,
    torch.ops.aten._neg_view.default: torch.ops.aten.neg.default,
}
"""Views that set a bit. Torch has acted on those bits before it dispatches to us, so parts must not have them."""


class _Unkeyed(Exception):
    """An argument that no key can be made of."""


def key_of(value: Any) -> Any:
    """What of an argument a plan depends on: a tensor's spec, other values themselves, but of floats the type alone."""
    kind = type(value)
    spec = getattr(value, "_spec", None)
    if spec is not None:
        return spec
    if kind is float or kind is complex:
        return kind
    if kind in _BY_VALUE:
        return kind, value
    if kind is list or kind is tuple:
        return tuple([key_of(item) for item in value])
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        return kind, value.dtype
    raise _Unkeyed


def dispatch(wrap: Wrap, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `op` on arguments of which some are DTensors; results are DTensors, but for values that are no tensors."""
    spec: Spec | None = getattr(args[0], "_spec", None) if args else None
    if spec is None or spec.is_symbolic:
        return _dispatch_once(wrap, op, args, kwargs, None, None)
    try:
        if kwargs:
            key: Any = (op, *map(key_of, args[1:]), *kwargs, *map(key_of, kwargs.values()))
        else:
            key = (op, *map(key_of, args[1:]))
    except _Unkeyed:
        return _dispatch_once(wrap, op, args, kwargs, None, None)
    run = spec.plans.get(key)
    if run is not None:
        return run(args, kwargs)
    return _dispatch_once(wrap, op, args, kwargs, spec.plans, key)


def _dispatch_once(
    wrap: Wrap,
    op: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plans: dict[Any, Run] | None,
    key: Any,
) -> Any:
    op_facts = facts(op)
    if op_facts.name.startswith(("aten._foreach_", "aten._fused_")):
        return foreach.run(wrap, op, op_facts, args, kwargs)
    if (materialized := _MATERIALIZED.get(op)) is not None:
        return as_copied_views(wrap, dispatch(wrap, materialized, args, kwargs), version_of(args[0]))
    if op_facts.is_inplace_view:
        return run_inplace_view(partial(dispatch, wrap), op, op_facts, args, kwargs)
    tensors = tensors_of([*args, *kwargs.values()])
    if any(is_copied_view(tensor) for tensor in tensors):
        return run_on_copied_views(wrap, partial(dispatch, wrap, op), op_facts, args, kwargs)
    written = written_tensors(op_facts, args, kwargs)
    if are_scalars_among_plain(tensors, written):
        values = [tensor if is_plain(tensor) else whole_of(tensor) for tensor in tensors]
        plain_args, plain_kwargs = replaced(args, kwargs, values)
        return op(*plain_args, **plain_kwargs)
    specs = specs_of(op_facts, tensors, written)
    if specs is None:
        if not (has_small_ones_only(tensors) or is_replication_implicit() or is_called_by_autograd(2)):
            raise meets_plain(op_facts, tensors)
        new_args, new_kwargs = replaced(args, kwargs, as_replicated(wrap, op_facts, written, tensors))
        return dispatch(wrap, op, tuple(new_args), new_kwargs)
    planned = _planned(wrap, op, op_facts, args, kwargs, specs)
    if planned is None:
        return run_whole(wrap, op, OpCall(op, op_facts, args, kwargs, specs, ()), tensors)
    run, rule = planned
    if plans is not None and not any(spec is not None and spec.is_symbolic for spec in specs):
        if len(plans) >= MAX_PLANS:
            plans.clear()
        plans[key] = _by_numbers(wrap, op, args, kwargs, run) if rule.reads_numbers else run
    return run(args, kwargs)


def _by_numbers(wrap: Wrap, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], first: Run) -> Run:
    """A closure that is good for calls with the same floats, and plans anew for others."""
    numbers = _numbers(args, kwargs)

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _numbers(args, kwargs) == numbers:
            return first(args, kwargs)
        return _dispatch_once(wrap, op, args, kwargs, None, None)

    return run


def _numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float | complex]:
    return [value for value in (*args, *kwargs.values()) if isinstance(value, float | complex)]


def _planned(
    wrap: Wrap,
    op: OpOverload,
    op_facts: OpFacts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    specs: tuple[Spec | None, ...],
) -> tuple[Run, Rule] | None:
    """How to run the call, by which rule; None for an operator without one."""
    if not _can_be_planned(op_facts):
        return None
    # Nothing of the call but its specs may be kept in the closure.
    shown_args, shown_kwargs = replaced(
        args, kwargs, [_meta(tensor) for tensor in tensors_of([*args, *kwargs.values()])]
    )
    call = OpCall(op, op_facts, tuple(shown_args), shown_kwargs, specs, ())
    outputs = _global_outputs(op, shown_args, shown_kwargs)
    if outputs is None:
        return None
    call = OpCall(op, op_facts, tuple(shown_args), shown_kwargs, specs, outputs)
    rule = find_rule(call)
    if rule is None:
        return None
    return bind(wrap, call, rule, propagate(call, rule)), rule


def _can_be_planned(op_facts: OpFacts) -> bool:
    """False when specs alone don't say what comes out, and for `out=`, whose layout is the caller's."""
    writes_elsewhere = bool(op_facts.mutated) and not op_facts.is_inplace
    return not (op_facts.returns_data or op_facts.shape_depends_on_values or writes_elsewhere)


def _global_outputs(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...] | None:
    """What `op` returns for tensors of the global shapes, on the meta device; None where it returns anything else."""
    meta_kwargs = dict(kwargs)
    if meta_kwargs.get("device") is not None:
        meta_kwargs["device"] = torch.device("meta")
    meta_kwargs.pop("pin_memory", None)
    meta_kwargs.pop("generator", None)
    try:
        results = op(*args, **meta_kwargs)
    except NotImplementedError:
        return None
    outputs = tuple(results) if isinstance(results, list | tuple) else (results,)
    return outputs if all(isinstance(output, torch.Tensor) for output in outputs) else None


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
