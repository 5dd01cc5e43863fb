"""Runs operators on DTensors: each is planned from specs alone, then run on the local parts.

The first call with given specs and arguments is planned: a rule of the operator's family, a layout for each operand, a
closure. Calls like it find the closure under their first operand's spec. An operator without a rule runs on whole
tensors, which is right for every operator but moves bytes, and says so once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from disttrain.dtensor._torch import (
    OpFacts,
    OpOverload,
    composed_in_inference,
    facts_of,
    handle_of,
    is_called_by_autograd,
    is_traced,
    off_the_record,
    put_on_record,
)
from disttrain.dtensor.dispatch.by_others import BY_OTHERS
from disttrain.dtensor.dispatch.call_plan import (
    Run,
    Wrap,
    bind,
    replaced,
    tensors_of,
    written_tensors,
)
from disttrain.dtensor.dispatch.even_bags import specs_of_even_bags
from disttrain.dtensor.dispatch.foreach import NORM, bind_lists, is_of_lists
from disttrain.dtensor.dispatch.implicit import replicates_plain
from disttrain.dtensor.dispatch.into_out import into_out, without_out
from disttrain.dtensor.dispatch.keys import Key, form_of_key, key_of_call, leader_of_list
from disttrain.dtensor.dispatch.mixed import (
    are_scalars_apart,
    as_replicated,
    has_small_ones_only,
    meets_plain,
    mesh_of,
    specs_of,
)
from disttrain.dtensor.dispatch.outputs.global_outputs import global_outputs
from disttrain.dtensor.dispatch.outputs.true_strides import rewrapped, with_true_strides
from disttrain.dtensor.dispatch.propagate import propagate
from disttrain.dtensor.dispatch.sizes.any_size import (
    AnySize,
    AnySizePlan,
    RuleChoice,
    any_size_plan,
    are_equal,
    moves_operands,
    numbers_of,
)
from disttrain.dtensor.dispatch.sizes.sized_views import SizedView
from disttrain.dtensor.dispatch.whole import run_whole, values_of
from disttrain.dtensor.foreign import check_ours
from disttrain.dtensor.gradients.scaling import UNSCALE, unscale
from disttrain.dtensor.gradients.zeros import own_zeros
from disttrain.dtensor.local_part import spec_of
from disttrain.dtensor.rules import CUSTOM, OpCall, find_rule, has_own_rule
from disttrain.dtensor.spec.layout import Spec
from disttrain.dtensor.views.calls import is_view_copy, run_with_copies

MAX_PLANS = 4096
"""Plans kept for one leading operand's spec, or for one form; past it, all are forgotten."""

facts = cache(facts_of)


class _Plan(NamedTuple):
    """The closure for one call, and for which other calls it holds."""

    run: Run
    is_lasting: bool = False
    """True if it holds for all calls of the same key."""
    any_size: AnySize | None = None
    """For calls that differ in sizes only."""
    as_seen: Callable[[Any], tuple[Run, Any] | None] | None = None
    """Of the first results: how to run calls with the strides that these have, and the results with these strides; None
    where they are as planned."""


def dispatch(wrap: Wrap, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `op` on arguments of which some are DTensors; results are DTensors, but for values that are no tensors.

    The plan of a call is looked up here and nowhere else: under its key, with the spec of its leading operand, which is
    the first argument, or the first tensor of a list that comes first.
    """
    leader: Spec | None = getattr(args[0], "_spec", None) if args else None
    num_args = 0 if kwargs else len(args)
    key: Key | None
    if leader is None:
        leader = leader_of_list(args)
        key = None if leader is None else key_of_call(op, args, kwargs)
    # The most frequent keys are made in line: a function call would cost as much as the key.
    elif num_args == 1:
        key = (handle_of(op),)
    elif num_args == 2 and (kind := type(args[1])) is float:
        key = (handle_of(op), kind)
    elif num_args == 2 and kind is type(args[0]):
        key = (handle_of(op), args[1]._spec)
    else:
        key = key_of_call(op, args[1:], kwargs)
    run = None if leader is None else leader.plans.get(key)
    if run is None:
        return _run_new(wrap, op, args, kwargs, leader, key)
    return run(args, kwargs)


def _run_new(
    wrap: Wrap, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], leader: Spec | None, key: Key | None
) -> Any:
    """Runs a call for which there is no plan yet, and keeps the plan for calls like it."""
    if leader is None or key is None or leader.is_symbolic:
        return _plan(wrap, op, args, kwargs).run(args, kwargs)
    form = leader.form
    form_key = None if form is None else form_of_key(leader, key)
    any_size: Any = None if form is None or form_key is None else form.plans.get(form_key)
    kind = type(any_size)
    if kind is AnySizePlan:
        return _run_in_new_size(wrap, op, leader, key, any_size, args, kwargs)
    if any_size is not None and kind is not RuleChoice:
        run = any_size.bound(wrap, leader, args) if kind is SizedView else any_size
        _keep(leader.plans, key, run)
        return run(args, kwargs)
    plan = None if any_size is None else _plan_as_chosen(wrap, op, args, kwargs, any_size)
    if plan is None:
        plan = _plan(wrap, op, args, kwargs)
    if plan.is_lasting:
        _keep(leader.plans, key, plan.run)
    if form is not None and form_key is not None and plan.any_size is not None:
        _keep(form.plans, form_key, plan.any_size)
    if plan.as_seen is None:
        return plan.run(args, kwargs)
    return _run_first(leader, key, plan.run, plan.as_seen, args, kwargs)


def _run_first(
    leader: Spec,
    key: Key,
    run: Run,
    as_seen: Callable[[Any], tuple[Run, Any] | None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Runs the first call of a plan, which shows whether the results have the planned strides."""
    results = run(args, kwargs)
    seen = as_seen(results)
    if seen is None:
        return results
    run, results = seen
    _keep(leader.plans, key, run)
    return results


def _run_in_new_size(
    wrap: Wrap,
    op: OpOverload,
    leader: Spec,
    key: Key,
    any_size: AnySizePlan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """A call that was planned for other sizes, and is then kept for its own."""
    numbers = any_size.numbers
    ran = any_size.run(wrap, args, kwargs) if numbers is None or numbers == numbers_of(args, kwargs) else None
    if ran is None:
        run = _plan(wrap, op, args, kwargs).run
        result = run(args, kwargs)
    else:
        run, result, specs = ran
        if numbers is not None:
            run = _while_numbers_last(wrap, op, args, kwargs, run)
        if not leader.dtype.is_floating_point:
            run = _while_dtype_lasts(wrap, op, (leader,), next(spec.dtype for spec in specs if spec), run)
    _keep(leader.plans, key, run)
    return result


def _keep(table: dict[Any, Any], key: Any, value: Any) -> None:
    if len(table) >= MAX_PLANS:
        table.clear()
    table[key] = value


def _plan_as_chosen(
    wrap: Wrap, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], choice: RuleChoice
) -> _Plan | None:
    """The plan of a call with other sizes than one that was planned; None where something else may be chosen for it."""
    specs = tuple([spec_of(tensor) for tensor in tensors_of([*args, *kwargs.values()])])
    return _plan_by_rule(wrap, op, facts(op), args, kwargs, specs, choice) if are_equal(specs) else None


def _plan(wrap: Wrap, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Plan:
    op_facts = facts(op)
    if op_facts.is_composed and op not in CUSTOM and not has_own_rule(op_facts):
        # Autograd is off, so nothing has decomposed it.
        return _Plan(lambda args, kwargs: composed_in_inference(op, *args, **kwargs))
    has_zeros = own_zeros(op, args)
    tensors = tensors_of([*args, *kwargs.values()])
    check_ours(op_facts.name, "an operand", *tensors)
    if any(is_view_copy(tensor) for tensor in tensors):
        return _Plan(partial(run_with_copies, partial(dispatch, wrap, op), wrap, op, op_facts))
    if is_of_lists(op_facts, args):
        list_specs = [getattr(tensor, "_spec", None) for tensor in tensors]
        run = bind_lists(wrap, op, op_facts, args, kwargs)
        if op is NORM:
            run = _while_numbers_last(wrap, op, args, kwargs, run)
        run = _while_dtype_lasts(wrap, op, list_specs, torch.get_default_dtype(), run)
        return _Plan(run, is_lasting=not _has_symbols(args, kwargs, list_specs))
    if op is UNSCALE:
        return _Plan(lambda args, kwargs: unscale(wrap, op, *args, **kwargs))
    written = written_tensors(op_facts, args, kwargs)
    if are_scalars_apart(tensors, written):
        return _Plan(_on_others(values_of(tensors), lambda args, kwargs: op(*args, **kwargs)))
    specs = specs_of(op_facts, tensors, written) or specs_of_even_bags(op_facts, args, kwargs, tensors)
    if specs is None:
        _check_may_replicate(op_facts, tensors)
        return _Plan(_on_others(as_replicated(wrap, op_facts, written, tensors), partial(dispatch, wrap, op)))
    plan = _plan_by_rule(wrap, op, op_facts, args, kwargs, specs) if _can_be_planned(op_facts) else None
    if plan is not None:
        # No plan is kept, since the next call whose gradients are zeros has to come here as well.
        return _Plan(plan.run) if has_zeros else plan
    by_others = BY_OTHERS.get(op)
    if by_others is not None:
        return _Plan(lambda args, kwargs: by_others(*args, **kwargs))

    def whole(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run_whole(wrap, op, OpCall(op, op_facts, args, kwargs, specs, ()), tensors)

    returning = without_out(op)
    return _Plan(whole if returning is None else partial(into_out, partial(dispatch, wrap), returning, whole))


def _on_others(tensors: Sequence[torch.Tensor], run: Run) -> Run:
    """`run` on the same arguments, but `tensors` in place of theirs."""

    def run_on_others(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        other_args, other_kwargs = replaced(args, kwargs, tensors)
        return run(tuple(other_args), other_kwargs)

    return run_on_others


def _check_may_replicate(op_facts: OpFacts, tensors: Sequence[torch.Tensor]) -> None:
    may_replicate = has_small_ones_only(tensors) or replicates_plain(mesh_of(tensors).world)
    if not (may_replicate or is_called_by_autograd()):
        raise meets_plain(op_facts, tensors)


def _plan_by_rule(
    wrap: Wrap,
    op: OpOverload,
    op_facts: OpFacts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    specs: tuple[Spec | None, ...],
    choice: RuleChoice | None = None,
) -> _Plan | None:
    """None for an operator without a rule; `choice` is what was chosen for such a call, if that is known."""
    has_symbols = is_traced() and _has_symbols(args, kwargs, specs)
    with nullcontext() if has_symbols else off_the_record():
        # Nothing of the call but its specs may be kept in the plan.
        with off_the_record(with_symbols=has_symbols):
            shown_args, shown_kwargs = replaced(
                args, kwargs, [_meta(tensor) for tensor in tensors_of([*args, *kwargs.values()])]
            )
            outputs = global_outputs(op, op_facts, shown_args, shown_kwargs, may_cache=not has_symbols)
        if outputs is None:
            return None
        if has_symbols:
            put_on_record(outputs, _numbers_of(args, kwargs, specs))
        call = OpCall(op, op_facts, tuple(shown_args), shown_kwargs, specs, outputs)
        rule = find_rule(call) if choice is None else choice.rule
        if rule is None:
            return None
        if rule.outputs is not None:
            call = replace(call, outputs=rule.outputs(call))
        if choice is not None:
            propagation = choice.propagation
        else:
            propagation = (rule.joint(call) if rule.joint is not None else None) or propagate(call, rule)
        if has_symbols:
            return _Plan(bind(wrap, call, rule, propagation))

        def bound(call: OpCall) -> Run:
            run = bind(wrap, call, rule, propagation)
            if rule.depends_on_numbers(specs):
                run = _while_numbers_last(wrap, op, args, kwargs, run)
            return _while_dtype_lasts(wrap, op, specs, outputs[0].dtype if outputs else torch.bool, run)

        def as_seen(results: Any) -> tuple[Run, Any] | None:
            seen = None if moves_operands(call, propagation) else with_true_strides(call, results)
            return None if seen is None else (bound(seen), rewrapped(wrap, results, seen.outputs))

        run = bound(call)
        return _Plan(run, True, choice or any_size_plan(call, rule, propagation, run), as_seen)


def _while_numbers_last(wrap: Wrap, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run) -> Run:
    """`run` for calls with the same floats, which are not in the key."""
    numbers = numbers_of(args, kwargs)
    if not numbers:
        return run
    if len(args) > 2 or kwargs:
        return _while(lambda args, kwargs: numbers_of(args, kwargs) == numbers, run, wrap, op)
    (number,) = numbers

    # A norm of many tensors, one by one, comes here: `_while` would call twice for each.
    def run_by_second(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run(args, kwargs) if args[1] == number else _plan(wrap, op, args, kwargs).run(args, kwargs)

    return run_by_second


def _while_dtype_lasts(wrap: Wrap, op: OpOverload, specs: Sequence[Spec | None], result: torch.dtype, run: Run) -> Run:
    """`run` as long as the default dtype is what it is now, where the result may be of that dtype."""
    if not _is_inexact(result) or any(spec is not None and _is_inexact(spec.dtype) for spec in specs):
        return run
    dtype = torch.get_default_dtype()
    return _while(lambda *_: torch.get_default_dtype() is dtype, run, wrap, op)


def _while(holds: Callable[[tuple[Any, ...], dict[str, Any]], bool], run: Run, wrap: Wrap, op: OpOverload) -> Run:
    """`run` for calls of which something `holds` that their key does not say; others are planned by themselves."""

    def run_guarded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run(args, kwargs) if holds(args, kwargs) else _plan(wrap, op, args, kwargs).run(args, kwargs)

    return run_guarded


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


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
