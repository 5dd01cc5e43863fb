"""Views that are copies: what a view without a rule gives when the memory it should share lies on other ranks.

Such a tensor may be read as long as nobody writes to what it is a view of, which the version that autograd counts for a
tensor and all its views tells. Writing to it would be lost, so it is refused. Both are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from disttrain.dtensor._torch import OpFacts
from disttrain.dtensor.call_plan import Wrap, replaced, tensors_of
from disttrain.dtensor.layout import Spec
from disttrain.errors import LayoutError


def is_copied_view(tensor: torch.Tensor) -> bool:
    spec: Spec | None = getattr(tensor, "_spec", None)
    return spec is not None and spec.is_copied_view


def version_of(tensor: torch.Tensor) -> int | None:
    """How often the tensor, or anything that shares its memory, was written to. Inference tensors don't count."""
    return None if tensor.is_inference() else tensor._version


def as_copied_views(wrap: Wrap, results: Any, version: int | None) -> Any:
    """DTensors marked as copied views of a tensor that was at `version`."""
    if isinstance(results, list | tuple):
        return type(results)(as_copied_views(wrap, result, version) for result in results)
    spec = results._spec
    marked: Any = wrap(results._local_tensor, Spec(spec.layout, spec.shape, spec.stride, spec.dtype, True))
    marked._copied_version = version
    return marked


def run_on_copied_views(
    wrap: Wrap, run: Callable[..., Any], facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `run(args, kwargs)` with the copies in place of the views; views of them are copied views as well."""
    tensors: list[Any] = tensors_of([*args, *kwargs.values()])
    written = {id(tensor) for position in facts.mutated for tensor in _at(position, args, kwargs)}
    for tensor in tensors:
        if is_copied_view(tensor):
            _check(facts, tensor, is_written=id(tensor) in written)
    copies = [_copy_of(wrap, tensor) if is_copied_view(tensor) else tensor for tensor in tensors]
    plain_args, plain_kwargs = replaced(args, kwargs, copies)
    results = run(tuple(plain_args), plain_kwargs)
    if facts.is_view and is_copied_view(tensors[0]):
        return as_copied_views(wrap, results, tensors[0]._copied_version)
    originals = {id(copy): tensor for copy, tensor in zip(copies, tensors, strict=True)}
    return originals.get(id(results), results)


def _at(position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors at an argument's position; keyword-only ones are all said to be at -1."""
    if position < 0:
        return tensors_of(list(kwargs.values()))
    return tensors_of([args[position]]) if position < len(args) else []


def _check(facts: OpFacts, tensor: Any, *, is_written: bool) -> None:
    spec: Spec = tensor._spec
    if is_written:
        raise LayoutError(
            facts.name,
            f"a view of shape {spec.shape} is a copy, since its tensor lies on other ranks; the write would be lost.",
            "Write to the tensor itself, redistribute it to Replicate() first, or clone() the view.",
            rank=spec.mesh.world.rank,
        )
    if tensor._copied_version is not None and version_of(tensor) != tensor._copied_version:
        raise LayoutError(
            facts.name,
            f"a view of shape {spec.shape} is a copy, and its tensor was written to since.",
            "Take the view again.",
            rank=spec.mesh.world.rank,
        )


def _copy_of(wrap: Wrap, tensor: Any) -> Any:
    spec: Spec = tensor._spec
    return wrap(tensor._local_tensor, Spec(spec.layout, spec.shape, spec.stride, spec.dtype))
