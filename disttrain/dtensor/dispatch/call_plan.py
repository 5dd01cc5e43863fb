"""A propagation bound to one call: a closure that takes the arguments and returns the results.

All that is known beforehand is bound once: which operands move, the results' specs, the positions of tensors among the
arguments. The usual calls, where nothing moves and one tensor comes out, have closures of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from disttrain.dtensor._torch import OpFacts, binding_of, change_wrapper
from disttrain.dtensor.local_part import local_part
from disttrain.dtensor.redistribute.local import redistribute_local
from disttrain.dtensor.redistribute.many import Move, Moves
from disttrain.dtensor.rules import Compute, OpCall, Propagation, Rule, result_specs
from disttrain.dtensor.spec.layout import Layout, Spec
from disttrain.dtensor.views.view_copy import AS_CONTIGUOUS, Fetch, ViewCopy
from disttrain.errors import LayoutError

Wrap = Callable[[torch.Tensor, Spec], torch.Tensor]
"""Makes a DTensor of a local part and a spec."""

Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]
"""Takes the arguments of a call, DTensors among them, and returns what the call returns."""


def bind(wrap: Wrap, call: OpCall, rule: Rule, propagation: Propagation) -> Run:
    """The closure for all calls with operands of the same specs and the same other arguments."""
    compute: Compute = call.op if rule.localize is None else rule.localize(call, propagation)
    if compute is call.op:
        compute = binding_of(call.op)
    specs = result_specs(call, propagation)
    moves = [
        (index, spec, layout)
        for index, (spec, layout) in enumerate(zip(call.operands, propagation.operands, strict=True))
        if spec is not None and layout is not None and spec.layout is not layout
    ]
    if call.facts.changes_shape:
        return _reshaping(call, compute, moves, specs[0])
    fetch = _fetch(call, rule, propagation)
    if fetch is not None or call.facts.is_view:
        return viewing(wrap, call, compute, fetch, specs)
    if not moves and specs and _takes_tensors_apart(call):
        if len(specs) == 1 and leads_with_tensors(call):
            if call.facts.returned == (0,) and propagation.results[0] is call.operand.layout:
                return _inplace(compute, len(call.operands))
            if not call.facts.mutated:
                return simple(wrap, compute, len(call.operands), len(call.arguments), call.keywords, specs[0])
        if not call.facts.mutated:
            positions = [index for index, argument in enumerate(call.arguments) if isinstance(argument, torch.Tensor)]
            return placed(wrap, compute, positions, specs)
    if not moves and len(specs) == 1 and _is_of_one_list(call):
        return of_list(wrap, compute, specs[0])
    run = _general(wrap, call, compute, moves, specs, propagation)
    return _apart(run) if moves and call.facts.name == "aten._unsafe_view" else run


def _takes_tensors_apart(call: OpCall) -> bool:
    """True when the operands are DTensors all, arguments by themselves, and the results are tensors by themselves."""
    return (
        None not in call.operands
        and len(call.operands) == sum(isinstance(argument, torch.Tensor) for argument in call.arguments)
        and not call.facts.returns_list
    )


def _is_of_one_list(call: OpCall) -> bool:
    """True when the operands, DTensors all, are the list that comes first, and one new tensor returns."""
    return (
        None not in call.operands
        and isinstance(call.arguments[0], list)
        and len(call.arguments[0]) == len(call.operands)
        and call.facts.returned == (None,)
        and not call.facts.returns_list
        and not call.facts.mutated
    )


def leads_with_tensors(call: OpCall) -> bool:
    """True when the operands are the first arguments, DTensors all, none of them in a list, and one tensor returns."""
    num_operands = len(call.operands)
    leading = call.arguments[:num_operands]
    return (
        len(call.facts.returned) == 1
        and not call.facts.returns_list
        and len(leading) == num_operands
        and all(isinstance(argument, torch.Tensor) for argument in leading)
        and None not in call.operands
    )


def simple(
    wrap: Wrap, compute: Compute, num_operands: int, num_arguments: int, keywords: Mapping[str, Any], spec: Spec
) -> Run:
    """For a call whose first arguments are its operands, of which nothing moves: one tensor of `spec` comes out."""
    arity = None if keywords else (num_operands, num_arguments)
    if arity == (1, 1):
        return lambda args, _: wrap(compute(args[0]._local_tensor), spec)
    if arity == (1, 2):
        return lambda args, _: wrap(compute(args[0]._local_tensor, args[1]), spec)
    if arity == (1, 3):
        return lambda args, _: wrap(compute(args[0]._local_tensor, args[1], args[2]), spec)
    if arity == (2, 2):
        return lambda args, _: wrap(compute(args[0]._local_tensor, args[1]._local_tensor), spec)
    if arity == (3, 3):
        return lambda args, _: wrap(compute(args[0]._local_tensor, args[1]._local_tensor, args[2]._local_tensor), spec)

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parts = [tensor._local_tensor for tensor in args[:num_operands]]
        return wrap(compute(*parts, *args[num_operands:], **kwargs), spec)

    return run


def wrapped(wrap: Wrap, parts: Any, specs: Sequence[Spec | None]) -> Any:
    """DTensors of the parts that an operator returned; what has no spec is returned as it is."""
    if isinstance(parts, torch.Tensor):
        assert specs[0] is not None
        return wrap(parts, specs[0])
    return tuple(
        [
            wrap(part, spec) if spec is not None and isinstance(part, torch.Tensor) else part
            for part, spec in zip(parts, specs, strict=True)
        ]
    )


def of_list(wrap: Wrap, compute: Compute, spec: Spec) -> Run:
    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return wrap(compute([tensor._local_tensor for tensor in args[0]], *args[1:], **kwargs), spec)

    return run


def placed(
    wrap: Wrap,
    compute: Compute,
    positions: Sequence[int],
    specs: Sequence[Spec | None],
    moves: Sequence[Move] = (),
) -> Run:
    """For a call whose operands are anywhere among its arguments; those that move are named by their positions."""
    moving = Moves(moves) if moves else None

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parts = list(args)
        for position in positions:
            parts[position] = args[position]._local_tensor
        if moving is not None:
            moving.run(parts)
        return wrapped(wrap, compute(*parts, **kwargs), specs)

    return run


def _inplace(compute: Compute, num_operands: int) -> Run:
    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        compute(*[tensor._local_tensor for tensor in args[:num_operands]], *args[num_operands:], **kwargs)
        return args[0]

    return run


def _fetch(call: OpCall, rule: Rule, propagation: Propagation) -> Fetch | None:
    """The fetch of the elements that a view needs; None if these are this rank's own part."""
    if rule.fetch is not None and (fetch := rule.fetch(call, propagation)) is not None:
        return fetch
    if not call.facts.is_view:
        return None
    spec, layout = call.operand, propagation.operands[0]
    assert layout is not None
    if layout is spec.layout:
        return None
    return redistributing(spec, layout)


def redistributing(spec: Spec, layout: Layout) -> Fetch:
    """The fetch of a view that needs its operand, which lies as `spec` says, laid out by `layout`."""
    moved = spec.with_layout(layout)

    def read(part: torch.Tensor) -> torch.Tensor:
        return redistribute_local(part, spec, layout)

    def write(values: torch.Tensor, part: torch.Tensor) -> None:
        part.copy_(redistribute_local(values, moved, spec.layout))

    return Fetch(read, write)


def viewing(wrap: Wrap, call: OpCall, compute: Compute, fetch: Fetch | None, specs: Sequence[Spec]) -> Run:
    """Closures for views and others of one operand: on its own memory, or on a copy that it lends."""
    if fetch is not None:
        is_view = call.facts.is_view
        return lambda args, kwargs: _run_on_copy(wrap, compute, fetch, specs, args, kwargs, is_view=is_view)
    if len(specs) == 1 and len(call.arguments) == 1 and not call.keywords and not call.facts.returns_list:
        return _viewing_alone(wrap, compute, specs)

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            results = compute(args[0]._local_tensor, *args[1:], **kwargs)
        except (RuntimeError, ValueError):
            return _run_on_copy(wrap, compute, AS_CONTIGUOUS, specs, args, kwargs)
        if type(results) is torch.Tensor and not torch.is_inference_mode_enabled():
            return wrap(results, specs[0])
        return _views(wrap, args[0], results, specs)

    return run


def _viewing_alone(wrap: Wrap, compute: Compute, specs: Sequence[Spec]) -> Run:
    """The shortest of them: for `t`, `detach` and others that have no argument but their operand."""
    spec = specs[0]

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            part = compute(args[0]._local_tensor)
        except (RuntimeError, ValueError):
            return _run_on_copy(wrap, compute, AS_CONTIGUOUS, specs, args, kwargs)
        return _views(wrap, args[0], part, specs) if torch.is_inference_mode_enabled() else wrap(part, spec)

    return run


def _run_on_copy(
    wrap: Wrap,
    compute: Compute,
    fetch: Fetch,
    specs: Sequence[Spec],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    is_view: bool = True,
) -> Any:
    """Runs on what `fetch` reads. Of a view the strides of a part, which its rank alone knows, may not allow what the
    whole's strides allow; a compiler that traces such a view raises ValueError."""
    if not is_view:
        return _wrapped_alike(wrap, compute(fetch.read(args[0]._local_tensor), *args[1:], **kwargs), specs)
    view_copy = ViewCopy(args[0], fetch)
    results = compute(view_copy.moved, *args[1:], **kwargs)
    return _views(wrap, args[0], results, [spec.as_view_copy(view_copy) for spec in specs])


def _views(wrap: Wrap, viewed: torch.Tensor, results: Any, specs: Sequence[Spec]) -> Any:
    """DTensors of parts that are views. A view has a version counter if its base has one."""
    if torch.is_inference_mode_enabled() and not viewed.is_inference():
        with torch.inference_mode(mode=False):
            return _wrapped_alike(wrap, results, specs)
    return _wrapped_alike(wrap, results, specs)


def _wrapped_alike(wrap: Wrap, results: Any, specs: Sequence[Spec]) -> Any:
    """DTensors of the part, or the list of parts, that an operator returned."""
    if isinstance(results, torch.Tensor):
        return wrap(results, specs[0])
    return [wrap(part, spec) for part, spec in zip(results, specs, strict=True)]


def _reshaping(call: OpCall, compute: Compute, moves: Sequence[Any], spec: Spec) -> Run:
    """Closures for `squeeze_` and the like, which leave a view of the operand in its place."""
    if moves:
        raise LayoutError(
            call.facts.name,
            f"a tensor of shape {call.operand.shape} that lies as {call.operand.layout} cannot keep its memory.",
            "Use the operator without the underscore, or redistribute first.",
            rank=call.operand.mesh.world.rank,
        )
    op = call.op

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        # A view, not the part itself, so that other tensors that share the part keep their shape.
        tensor._local_tensor = compute(tensor._local_tensor.view_as(tensor._local_tensor), *args[1:], **kwargs)
        tensor._spec = spec
        change_wrapper(op, args, kwargs)
        return tensor

    return run


def _apart(run: Run) -> Run:
    """Marks results that do not share the memory that torch assumes they share; `out=` must not be such a result."""

    def run_apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = run(args, kwargs)
        result._stands_apart = True
        return result

    return run_apart


def _general(
    wrap: Wrap,
    call: OpCall,
    compute: Compute,
    moves: Sequence[Move],
    specs: Sequence[Spec],
    propagation: Propagation,
) -> Run:
    returned = call.facts.returned
    writes = _writes(call, propagation)
    is_list = call.facts.returns_list
    moving = Moves(moves)

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = tensors_of([*args, *kwargs.values()])
        parts = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
        moving.run(parts)
        local_args, local_kwargs = replaced(args, kwargs, parts)
        results = compute(*local_args, **local_kwargs)
        for index, spec, layout in writes:
            part = local_part(tensors[index])
            if layout is not spec.layout or parts[index] is not part:
                part.copy_(redistribute_local(parts[index], spec.with_layout(layout), spec.layout))
        if not specs:
            return None
        if is_list:
            return [wrap(part, spec) for part, spec in zip(results, specs, strict=True)]
        if len(specs) == 1:
            return wrap(results, specs[0]) if returned[0] is None else args[returned[0]]
        return tuple(
            args[position] if position is not None else wrap(part, spec) if isinstance(part, torch.Tensor) else part
            for part, spec, position in zip(results, specs, returned, strict=True)
        )

    return run


def _writes(call: OpCall, propagation: Propagation) -> list[tuple[int, Spec, Layout]]:
    """Operands that are written to: where each stands among the tensors, its spec, and how it lies afterwards."""
    writes = []
    index = 0
    for position, argument in enumerate(call.arguments):
        num_tensors = len(tensors_of([argument]))
        if position in call.facts.mutated and num_tensors == 1 and (spec := call.operands[index]) is not None:
            layout = propagation.operands[index]
            if position in call.facts.returned:
                layout = propagation.results[call.facts.returned.index(position)]
            assert layout is not None
            writes.append((index, spec, layout))
        index += num_tensors
    return writes


def tensors_of(values: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors among the values and in their lists, in order."""
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors.extend(item for item in value if isinstance(item, torch.Tensor))
    return tensors


def written_tensors(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that a call writes to."""
    by_name = {**dict(zip(facts.arguments, args, strict=False)), **kwargs}
    return tensors_of([by_name.get(name) for name in facts.written])


def replaced(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with their tensors, in the order of `tensors_of`, replaced by `tensors`."""
    supply = iter(tensors)

    def replace(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return next(supply)
        if isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor) for item in value):
            return [next(supply) if isinstance(item, torch.Tensor) else item for item in value]
        return value

    return [replace(value) for value in args], {name: replace(value) for name, value in kwargs.items()}
