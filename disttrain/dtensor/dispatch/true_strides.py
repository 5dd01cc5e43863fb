"""Strides that kernels really give, where torch foretells others.

Results are planned on the meta device. For some operators that says other strides than the device's own kernel then
gives (batch and layer norms, `logsigmoid`, `svd`, `fft` on CPUs): views of the result would be refused that torch
allows, or the other way round. The first run of a plan shows it, and the plan is bound again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from disttrain.dtensor.dispatch.call_plan import Wrap
from disttrain.dtensor.rules import OpCall
from disttrain.dtensor.spec.layout import Spec
from disttrain.dtensor.spec.shard_sizes import contiguous_strides, is_permuted, local_shape


def with_true_strides(call: OpCall, results: Any) -> OpCall | None:
    """`call` with outputs whose strides are those of `results`, its first ones; None where these are as foretold.

    Decided by what all ranks see alike, since strides decide what further operators do.
    """
    if not call.outputs or call.facts.is_view or call.facts.returns_list:
        return None
    tensors = results if isinstance(results, tuple) else (results,)
    outputs = [
        _as_it_is(output, tensor) if written is None else output
        for output, tensor, written in zip(call.outputs, tensors, call.facts.returned, strict=True)
    ]
    if all(new is old for new, old in zip(outputs, call.outputs, strict=True)):
        return None
    return replace(call, outputs=tuple(outputs))


def rewrapped(wrap: Wrap, results: Any, outputs: Sequence[torch.Tensor]) -> Any:
    """The results again, with the strides of `outputs`."""
    if isinstance(results, tuple):
        return tuple(_rewrapped(wrap, *pair) for pair in zip(results, outputs, strict=True))
    return _rewrapped(wrap, results, outputs[0])


def _rewrapped(wrap: Wrap, result: Any, output: torch.Tensor) -> Any:
    spec: Spec | None = getattr(result, "_spec", None)
    if spec is None or spec.stride == output.stride():
        return result
    return wrap(result._local_tensor, Spec(spec.layout, spec.shape, tuple(output.stride()), spec.dtype))


def _as_it_is(output: torch.Tensor, result: Any) -> torch.Tensor:
    spec: Spec | None = getattr(result, "_spec", None)
    if spec is None:
        return output
    strides = _true_strides(spec, result._local_tensor)
    if strides == spec.stride:
        return output
    return torch.empty_strided(spec.shape, strides, dtype=output.dtype, device="meta")


def _true_strides(spec: Spec, part: torch.Tensor) -> tuple[int, ...]:
    """The whole's strides, by those of its part; as foretold where parts differ or have too few elements to tell."""
    # A gradient that was not asked for is planned without elements, whatever kernels return.
    if part.layout is not torch.strided or part.is_meta or tuple(part.shape) != spec.local_shape:
        return spec.stride
    last = [size - 1 for size in spec.mesh.shape]
    smallest = local_shape(spec.shape, spec.mesh.shape, last, spec.placements)
    if smallest == spec.shape:
        return part.stride()
    if any(least < 2 <= size for least, size in zip(smallest, spec.shape, strict=True)):
        return spec.stride
    is_dense = is_permuted(part.shape, part.stride()) and is_permuted(spec.shape, spec.stride)
    if is_dense and part.stride() == contiguous_strides(part.shape):
        return contiguous_strides(spec.shape)
    if not is_dense or _order(spec.shape, part.stride()) == _order(spec.shape, spec.stride):
        return spec.stride
    strides, step = [0] * len(spec.shape), 1
    for dim in sorted(range(len(spec.shape)), key=lambda dim: (part.stride(dim), -dim)):
        strides[dim] = step
        step *= spec.shape[dim]
    return tuple(strides)


def _order(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The dims with more than one element, innermost first."""
    return sorted((dim for dim, size in enumerate(shape) if size > 1), key=lambda dim: strides[dim])
