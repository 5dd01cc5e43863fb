"""What happens when torch calls an operator on DTensors: plan it from specs alone, then run it on the local parts.

The first call with given specs and arguments is planned: a rule of the operator's family, a layout for each operand, a
closure. Calls like it find the closure under their first operand's spec. An operator without a rule runs on whole
tensors, which is right for every operator but moves bytes, and says so once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from disttrain.dtensor._torch import (
    OpFacts,
    OpOverload,
    composed_in_inference,
    facts_of,
    is_called_by_autograd,
    is_traced,
    off_the_record,
    put_on_record,
)
from disttrain.dtensor.dispatch import foreach
from disttrain.dtensor.dispatch.by_others import BY_OTHERS
from disttrain.dtensor.dispatch.call_plan import Run, Wrap, bind, replaced, simple, tensors_of, written_tensors
from disttrain.dtensor.dispatch.even_bags import specs_of_even_bags
from disttrain.dtensor.dispatch.global_outputs import global_outputs
from disttrain.dtensor.dispatch.implicit import replicates_plain
from disttrain.dtensor.dispatch.keys import form_of_call, key_of_call
from disttrain.dtensor.dispatch.mixed import (
    are_scalars_apart,
    as_replicated,
    has_small_ones_only,
    meets_plain,
    mesh_of,
    specs_of,
)
from disttrain.dtensor.dispatch.propagate import propagate
from disttrain.dtensor.dispatch.recipe import Recipe, recipe_for
from disttrain.dtensor.dispatch.true_strides import rewrapped, with_true_strides
from disttrain.dtensor.dispatch.whole import run_whole, values_of
from disttrain.dtensor.foreign import check_ours
from disttrain.dtensor.gradients.scaling import UNSCALE, unscale
from disttrain.dtensor.gradients.zeros import own_zeros
from disttrain.dtensor.rules import CUSTOM, OpCall, Propagation, Rule, find_rule, has_own_rule
from disttrain.dtensor.spec.layout import Spec
from disttrain.dtensor.views.calls import is_view_copy, run_with_copies

MAX_PLANS = 4096
"""Closures kept for one first operand's spec; past it, all are forgotten."""

facts = cache(facts_of)


class _Planned(NamedTuple):
    run: Run
    rule: Rule
    recipe: Recipe | None
    dtype: torch.dtype
    """Of the first result."""
    call: OpCall
    propagation: Propagation


def dispatch(wrap: Wrap, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `op` on arguments of which some are DTensors; results are DTensors, but for values that are no tensors."""
    first: Any = args[0] if args else None
    is_list = type(first) is list and bool(first)
    if is_list and op.name().startswith(("aten::_foreach_", "aten::_fused_")):
        result = foreach.run_known(wrap, op, args, kwargs)
        return _dispatch_once(wrap, op, args, kwargs, None, None) if result is foreach.MOVES else result
    spec: Spec | None = getattr(first[0] if is_list else first, "_spec", None)
    if spec is None or spec.is_symbolic or spec.view_copy is not None:
        return _dispatch_once(wrap, op, args, kwargs, None, None)
    key = key_of_call(op, (None, *args) if is_list else args, kwargs)
    if key is None:
        return _dispatch_once(wrap, op, args, kwargs, None, None)
    run = spec.plans.get(key)
    if run is not None:
        return run(args, kwargs)
    return _dispatch_once(wrap, op, args, kwargs, spec.plans, key)


def follow_recipe(
    wrap: Wrap, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], spec: Spec, key: tuple[Any, ...]
) -> torch.Tensor | None:
    """What `op` returns where it was planned for other sizes, kept as `key` for those of `spec`; else None."""
    recipe: Recipe | None = spec.layout.plans.get(form_of_call(op, args, kwargs))
    if recipe is None:
        return None
    result, result_spec = recipe.follow(wrap, args, kwargs)
    if result_spec is not None:
        run = simple(wrap, recipe.compute, recipe.num_operands, len(args), kwargs, result_spec)
        _keep(spec.plans, key, _while_dtype_lasts(wrap, op, run, (spec,), result_spec.dtype))
    return result


def _dispatch_once(
    wrap: Wrap,
    op: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plans: dict[Any, Run] | None,
    key: Any,
) -> Any:
    op_facts = facts(op)
    if op_facts.is_composed and op not in CUSTOM and not has_own_rule(op_facts):
        return composed_in_inference(op, *args, **kwargs)  # autograd, which would have taken it apart, is off
    if own_zeros(op, args):
        plans = None  # so that the next such call comes here, too
    tensors = tensors_of([*args, *kwargs.values()])
    check_ours(op_facts.name, "an operand", *tensors)
    if any(is_view_copy(tensor) for tensor in tensors):
        return run_with_copies(partial(dispatch, wrap, op), wrap, op, op_facts, args, kwargs)
    if foreach.is_of_lists(op_facts, args):
        return foreach.run(wrap, op, op_facts, args, kwargs)
    if op is UNSCALE:
        return unscale(wrap, op, *args, **kwargs)
    written = written_tensors(op_facts, args, kwargs)
    if are_scalars_apart(tensors, written):
        plain_args, plain_kwargs = replaced(args, kwargs, values_of(tensors))
        return op(*plain_args, **plain_kwargs)
    specs = specs_of(op_facts, tensors, written) or specs_of_even_bags(op_facts, args, kwargs, tensors)
    if specs is None:
        _check_may_replicate(op_facts, tensors)
        new_args, new_kwargs = replaced(args, kwargs, as_replicated(wrap, op_facts, written, tensors))
        return dispatch(wrap, op, tuple(new_args), new_kwargs)
    has_symbols = is_traced() and _has_symbols(args, kwargs, specs)
    if plans is None or has_symbols:
        planned = _planned(wrap, op, op_facts, args, kwargs, specs, has_symbols=has_symbols)
        if planned is None:
            return _without_plan(wrap, OpCall(op, op_facts, args, kwargs, specs, ()), tensors)
        return planned.run(args, kwargs)
    form = form_of_call(op, args, kwargs)
    assert specs[0] is not None
    recipes: dict[Any, Recipe] = specs[0].layout.plans
    planned = _planned(wrap, op, op_facts, args, kwargs, specs)
    if planned is None:
        return _without_plan(wrap, OpCall(op, op_facts, args, kwargs, specs, ()), tensors)
    if form is not None and planned.recipe is not None:
        _keep(recipes, form, planned.recipe)
    run, results = _first_run(wrap, planned, args, kwargs)
    run = _by_numbers(wrap, op, args, kwargs, run) if planned.rule.reads_numbers else run
    _keep(plans, key, _while_dtype_lasts(wrap, op, run, specs, planned.dtype))
    return results


def _first_run(wrap: Wrap, planned: _Planned, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Run, Any]:
    """The plan, bound to the strides that its first run shows, and the results."""
    results = planned.run(args, kwargs)
    call = with_true_strides(planned.call, results)
    if call is None:
        return planned.run, results
    return bind(wrap, call, planned.rule, planned.propagation), rewrapped(wrap, results, call.outputs)


def _check_may_replicate(op_facts: OpFacts, tensors: Sequence[torch.Tensor]) -> None:
    may_replicate = has_small_ones_only(tensors) or replicates_plain(mesh_of(tensors).world)
    if not (may_replicate or is_called_by_autograd()):
        raise meets_plain(op_facts, tensors)


def _without_plan(wrap: Wrap, call: OpCall, tensors: Sequence[torch.Tensor]) -> Any:
    by_others = BY_OTHERS.get(call.op)
    if by_others is not None:
        return by_others(*call.arguments, **call.keywords)
    return run_whole(wrap, call.op, call, tensors)


def _keep(table: dict[Any, Any], key: Any, value: Any) -> None:
    if len(table) >= MAX_PLANS:
        table.clear()
    table[key] = value


def _by_numbers(wrap: Wrap, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], first: Run) -> Run:
    """A closure that is good for calls with the same floats, and plans anew for others."""
    numbers = _numbers(args, kwargs)
    if not numbers:
        return first
    if len(args) == 2 and not kwargs and type(args[1]) is float:
        (number,) = numbers

        # A norm of many tensors, one by one, comes here; its key says that there are two arguments, and what kinds.
        def run_by_second(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args[1] == number:
                return first(args, kwargs)
            return _dispatch_once(wrap, op, args, kwargs, None, None)

        return run_by_second

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _numbers(args, kwargs) == numbers:
            return first(args, kwargs)
        return _dispatch_once(wrap, op, args, kwargs, None, None)

    return run


def _while_dtype_lasts(
    wrap: Wrap, op: OpOverload, first: Run, specs: Sequence[Spec | None], result: torch.dtype
) -> Run:
    """A closure that is good as long as the default dtype is what it is now, where the result may be of that dtype."""
    if not _is_inexact(result):
        return first
    for spec in specs:
        if spec is not None and _is_inexact(spec.dtype):
            return first
    dtype = torch.get_default_dtype()

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.get_default_dtype() is dtype:
            return first(args, kwargs)
        return _dispatch_once(wrap, op, args, kwargs, None, None)

    return run


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float | complex]:
    return [value for value in (*args, *kwargs.values()) if isinstance(value, float | complex)]


def _planned(
    wrap: Wrap,
    op: OpOverload,
    op_facts: OpFacts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    specs: tuple[Spec | None, ...],
    *,
    has_symbols: bool = False,
) -> _Planned | None:
    """How to run the call; None for an operator without a rule."""
    if not _can_be_planned(op_facts):
        return None
    if has_symbols:
        return _planned_by_rule(wrap, op, op_facts, args, kwargs, specs, has_symbols=True)
    with off_the_record():
        return _planned_by_rule(wrap, op, op_facts, args, kwargs, specs, has_symbols=False)


def _planned_by_rule(
    wrap: Wrap,
    op: OpOverload,
    op_facts: OpFacts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    specs: tuple[Spec | None, ...],
    *,
    has_symbols: bool,
) -> _Planned | None:
    # Nothing of the call but its specs may be kept in the closure.
    with off_the_record(with_symbols=has_symbols):
        shown_args, shown_kwargs = replaced(
            args, kwargs, [_meta(tensor) for tensor in tensors_of([*args, *kwargs.values()])]
        )
        outputs = global_outputs(op, op_facts, shown_args, shown_kwargs, may_know=not has_symbols)
    if outputs is None:
        return None
    if has_symbols:
        put_on_record(outputs, _numbers_of(args, kwargs, specs))
    call = OpCall(op, op_facts, tuple(shown_args), shown_kwargs, specs, outputs)
    rule = find_rule(call)
    if rule is None:
        return None
    if rule.outputs is not None:
        call = replace(call, outputs=rule.outputs(call))
    propagation = (rule.joint(call) if rule.joint is not None else None) or propagate(call, rule)
    dtype = outputs[0].dtype if outputs else torch.bool
    recipe = None if has_symbols else recipe_for(call, rule, propagation)
    return _Planned(bind(wrap, call, rule, propagation), rule, recipe, dtype, call, propagation)


def _has_symbols(args: tuple[Any, ...], kwargs: dict[str, Any], specs: Sequence[Spec | None]) -> bool:
    return any(isinstance(number, torch.SymInt | torch.SymFloat) for number in _numbers_of(args, kwargs, specs))


def _numbers_of(args: tuple[Any, ...], kwargs: dict[str, Any], specs: Sequence[Spec | None]) -> Iterator[Any]:
    """The sizes and strides of the operands, and the other arguments, of which some are numbers."""
    for spec in specs:
        if spec is not None and spec.is_symbolic:
            yield from spec.shape
            yield from spec.stride
    for value in (*args, *kwargs.values()):
        yield from value if isinstance(value, list | tuple) else (value,)


def _can_be_planned(op_facts: OpFacts) -> bool:
    """False when specs alone don't say what comes out, and for `out=`, whose layout is the caller's."""
    knows_writes = op_facts.is_inplace or (has_own_rule(op_facts) and -1 not in op_facts.mutated)
    writes_elsewhere = bool(op_facts.mutated) and not knows_writes
    return not (op_facts.returns_data or op_facts.shape_depends_on_values or writes_elsewhere)


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
