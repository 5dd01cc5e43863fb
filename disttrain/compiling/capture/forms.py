"""The form of a call's arguments: calls of one form share a recording, whose inputs have memory of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from disttrain.compiling._torch import tree_flatten, tree_unflatten
from disttrain.dtensor import DTensor
from disttrain.dtensor.local_part import local_part
from disttrain.errors import ArgumentError, CompileError, ShapeError

OPERATION = "capture_step"


class TensorForm(NamedTuple):
    """All of a tensor but its values. `spec` is that of a DTensor, whose `shape` and `strides` are its part's."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    spec: Any


class Form(NamedTuple):
    """The nesting of arguments, and what is at each place: a TensorForm, or a value with its type."""

    structure: Any
    leaves: tuple[Any, ...]


def form_of(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Form, list[torch.Tensor]]:
    """The form of a call's arguments, and the tensors among them.

    Raises: ShapeError for a tensor that is not on a GPU; ArgumentError for what is neither a tensor nor a plain value,
            since it can't be seen whether it is as it was.
    """
    leaves, structure = tree_flatten((tuple(args), kwargs))
    return Form(structure, tuple(map(_leaf, leaves))), [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def check_results(results: Sequence[Any]) -> None:
    """Raises CompileError for a result that replays could not compute anew."""
    for value in results:
        if value is not None and not (isinstance(value, torch.Tensor) and part_of(value).is_cuda):
            kind = (
                f"a tensor on {value.device}"
                if isinstance(value, torch.Tensor)
                else f"a value of type {type(value).__name__}"
            )
            problem = f"the step returns {kind}, which is computed by the host: each replay would return it again."
            raise CompileError(OPERATION, problem, "Return tensors on the GPU, and read them after the call.")


def with_tensors(form: Form, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the form, with these tensors in the order of `form_of`."""
    supply = iter(tensors)
    leaves = [next(supply) if isinstance(leaf, TensorForm) else leaf[1] for leaf in form.leaves]
    args, kwargs = tree_unflatten(leaves, form.structure)
    return args, kwargs


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor on this rank."""
    return local_part(tensor) if isinstance(tensor, DTensor) else tensor


def _leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        part = part_of(value)
        if not part.is_cuda:
            problem = (
                f"an argument of shape {tuple(value.shape)} lies on {value.device}; a graph reads the GPU's memory."
            )
            raise ShapeError(OPERATION, problem, "Move it to the GPU before the call.")
        spec = value._spec if isinstance(value, DTensor) else None
        return TensorForm(tuple(part.shape), part.stride(), part.dtype, part.device, value.requires_grad, spec)
    try:
        hash(value)
    except TypeError:
        problem = f"an argument is of type {type(value).__name__}, of which it can't be told whether it has changed."
        raise ArgumentError(
            OPERATION, problem, "Give tensors, numbers, strings, and lists or dicts of these."
        ) from None
    return type(value), value
