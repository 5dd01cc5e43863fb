"""Calls with view copies among their operands: brought up to date before, written back after."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from disttrain.dtensor._torch import OpFacts, OpOverload, change_wrapper
from disttrain.dtensor.dispatch.call_plan import Wrap, replaced, tensors_of, written_tensors
from disttrain.dtensor.dispatch.foreach import is_of_lists
from disttrain.dtensor.views.counted_places import counts_from_start, is_a_view
from disttrain.dtensor.views.view_copy import ViewCopy, count_writes


def is_view_copy(tensor: torch.Tensor) -> bool:
    """True for a DTensor that is a view by way of a copy."""
    spec = getattr(tensor, "_spec", None)
    return spec is not None and spec.view_copy is not None


def up_to_date(tensor: Any) -> torch.Tensor:
    """A DTensor's part on this rank; of a view copy, as what it views is now, which is collective."""
    if tensor._spec.view_copy is not None:
        tensor._spec.view_copy.refresh()
    return cast(torch.Tensor, tensor._local_tensor)


def run_with_copies(
    run: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    wrap: Wrap,
    op: OpOverload,
    facts: OpFacts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """`run` on stand-ins for view copies, which share their memory and are plain tensors."""
    tensors: list[Any] = tensors_of([*args, *kwargs.values()])
    if facts.is_view and torch.is_inference_mode_enabled() and not tensors[0].is_inference():
        with torch.inference_mode(mode=False):
            return run_with_copies(run, wrap, op, facts, args, kwargs)
    if counts_from_start(facts, args, kwargs) and is_view_copy(tensors[0]):
        raise is_a_view(facts.name, tensors[0]._spec.mesh)
    written = written_tensors(facts, args, kwargs)
    if is_of_lists(facts, args) and len(args[0]) > 1 and any(is_view_copy(tensor) for tensor in written):
        return _one_by_one(run, written, args, kwargs)
    for view_copy in _copies_among(tensors):
        view_copy.refresh()
    # Copies of one tensor would each write back what they have, and undo what the others wrote.
    is_alone = len(written) < 2
    apart = set() if is_alone else {id(tensor) for tensor in written}
    stand_ins = {id(tensor): _stand_in(wrap, tensor, is_apart=id(tensor) in apart) for tensor in tensors}
    new_args, new_kwargs = replaced(args, kwargs, [stand_ins[id(tensor)] for tensor in tensors])
    if is_alone:
        for view_copy in _copies_among(written):
            view_copy.begin()
    result = run(tuple(new_args), new_kwargs)
    if facts.changes_shape:
        return _changed(op, tensors[0], stand_ins[id(tensors[0])], args, kwargs)
    if facts.mutated:
        if is_alone:
            for view_copy in _copies_among(written):
                view_copy.settle()
        else:
            _copy_in_turn(written, stand_ins)
        originals = {id(stand_ins[id(tensor)]): tensor for tensor in tensors}
        return _each(result, lambda tensor: originals.get(id(tensor), tensor))
    if facts.is_view:
        owed: ViewCopy = tensors[0]._spec.view_copy
        return _each(result, lambda tensor: _owing(wrap, tensor, owed))
    return result


def _copies_among(tensors: Sequence[Any]) -> list[ViewCopy]:
    return list(dict.fromkeys(tensor._spec.view_copy for tensor in tensors if is_view_copy(tensor)))


def _stand_in(wrap: Wrap, tensor: Any, *, is_apart: bool) -> Any:
    """The tensor itself where it is no view copy; `is_apart`: one that has memory of its own."""
    if not is_view_copy(tensor):
        return tensor
    part: torch.Tensor = tensor._local_tensor
    return wrap(part.clone() if is_apart else part, tensor._spec.owned())


def _one_by_one(
    run: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    written: Sequence[torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """An operator of lists on one element of each list at a time: what one is written to, the next may be a view of."""
    num_elements = len(args[0])

    def at(index: int, value: Any) -> Any:
        has_elements = isinstance(value, list | tuple) or (isinstance(value, torch.Tensor) and value.ndim == 1)
        return value[index : index + 1] if has_elements and len(value) == num_elements else value

    for index in range(num_elements):
        run(tuple(at(index, value) for value in args), {name: at(index, value) for name, value in kwargs.items()})
        count_writes([tensor for tensor in written if not is_view_copy(tensor)])


def _copy_in_turn(written: Sequence[Any], stand_ins: Mapping[int, torch.Tensor]) -> None:
    """Put what has been written to stand-ins with memory of their own where it belongs."""
    count_writes([tensor for tensor in written if not is_view_copy(tensor)])
    for tensor in written:
        if is_view_copy(tensor):
            tensor.copy_(stand_ins[id(tensor)])


def _changed(op: OpOverload, tensor: Any, stand_in: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """`tensor`, with the shape that its stand-in has got."""
    tensor._local_tensor, tensor._spec = stand_in._local_tensor, stand_in._spec.as_view_copy(tensor._spec.view_copy)
    change_wrapper(op, args, kwargs)
    return cast(torch.Tensor, tensor)


def _owing(wrap: Wrap, view: Any, view_copy: ViewCopy) -> torch.Tensor:
    """A view of a view copy: of the same copy where it shares the memory, else a copy of that."""
    if is_view_copy(view):
        view._spec.view_copy.pass_on(view_copy)
        return cast(torch.Tensor, view)
    return wrap(view._local_tensor, view._spec.as_view_copy(view_copy))


def _each(result: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(result, torch.Tensor):
        return change(result)
    if isinstance(result, list | tuple):
        return type(result)(_each(item, change) for item in result)
    return result
