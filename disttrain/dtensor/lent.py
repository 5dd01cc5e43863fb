"""Calls with operands on loan: made up to date before, put back after, and computed as any other in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from disttrain.dtensor._torch import OpFacts, OpOverload, change_wrapper
from disttrain.dtensor.call_plan import Wrap, replaced, tensors_of, written_tensors
from disttrain.dtensor.counted_places import counts_from_start, is_a_view
from disttrain.dtensor.loan import Loan
from disttrain.errors import LayoutError


def is_lent(tensor: torch.Tensor) -> bool:
    """True for a DTensor that is a view by way of a copy."""
    spec = getattr(tensor, "_spec", None)
    return spec is not None and spec.loan is not None


def run_lent(
    run: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    wrap: Wrap,
    op: OpOverload,
    facts: OpFacts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """`run` on stand-ins for the tensors on loan, which share their memory and are on no loan."""
    tensors: list[Any] = tensors_of([*args, *kwargs.values()])
    if facts.is_view and torch.is_inference_mode_enabled() and not tensors[0].is_inference():
        with torch.inference_mode(mode=False):
            return run_lent(run, wrap, op, facts, args, kwargs)
    loans = list(dict.fromkeys(tensor._spec.loan for tensor in tensors if is_lent(tensor)))
    if counts_from_start(facts, args, kwargs) and is_lent(tensors[0]):
        raise is_a_view(facts.name, tensors[0]._spec.mesh)
    written = _written_loans(facts, args, kwargs)
    for loan in loans:
        loan.refresh()
    stand_ins = [wrap(tensor._local_tensor, tensor._spec.owned()) if is_lent(tensor) else tensor for tensor in tensors]
    new_args, new_kwargs = replaced(args, kwargs, stand_ins)
    result = run(tuple(new_args), new_kwargs)
    if facts.changes_shape:
        return _changed(op, tensors[0], stand_ins[0], args, kwargs)
    if facts.mutated:
        for loan in written:
            loan.settle()
        originals = {id(stand_in): tensor for stand_in, tensor in zip(stand_ins, tensors, strict=True)}
        return _each(result, lambda tensor: originals.get(id(tensor), tensor))
    if facts.is_view:
        owed: Loan = tensors[0]._spec.loan
        return _each(result, lambda tensor: _owing(wrap, tensor, owed))
    return result


def _written_loans(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Loan]:
    """The loans of what the operator writes to."""
    written = [tensor for tensor in written_tensors(facts, args, kwargs) if is_lent(tensor)]
    loans = list(dict.fromkeys(tensor._spec.loan for tensor in written))
    if len({id(loan.root) for loan in loans}) < len(loans):
        # Each would put back what it has, and undo what the others wrote.
        raise LayoutError(
            facts.name,
            "several views of one tensor, each across the dim along which it is cut, are written to at once.",
            "Write to one after the other, or redistribute the tensor first.",
            rank=written[0]._spec.mesh.world.rank,
        )
    return loans


def _changed(op: OpOverload, tensor: Any, stand_in: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """`tensor`, with the shape that its stand-in has got."""
    tensor._local_tensor, tensor._spec = stand_in._local_tensor, stand_in._spec.lent(tensor._spec.loan)
    change_wrapper(op, args, kwargs)
    return cast(torch.Tensor, tensor)


def _owing(wrap: Wrap, view: Any, loan: Loan) -> torch.Tensor:
    """A view of something on loan: on the same loan where it shares the memory, else on one from that."""
    if is_lent(view):
        view._spec.loan.parent = loan
        return cast(torch.Tensor, view)
    return wrap(view._local_tensor, view._spec.lent(loan))


def _each(result: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(result, torch.Tensor):
        return change(result)
    if isinstance(result, list | tuple):
        return type(result)(_each(item, change) for item in result)
    return result
