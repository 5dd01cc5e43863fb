"""The strides that kernels really return, where torch predicts others.

Results are planned on the meta device. For some operators the prediction differs from the strides of the device's own
kernel (batch and layer norms, `logsigmoid`, `svd`, `fft` on CPUs). Then views of the result would be refused that torch
allows, or the other way round. The first run of a plan shows that, and the plan is bound again. Where a rank's part has
too few elements to show it, the operator is run once on whole operands of zeros, if these are small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from disttrain.dtensor._torch import is_traced
from disttrain.dtensor.dispatch.call_plan import Wrap, replaced, tensors_of
from disttrain.dtensor.rules import OpCall
from disttrain.dtensor.spec.layout import Spec
from disttrain.dtensor.spec.shard_sizes import contiguous_strides, is_permuted, local_shape, strides_in_order

MAX_ZEROS = 1 << 14
"""Elements of an operator's operands up to which it is run on zeros."""


def with_true_strides(call: OpCall, results: Any) -> OpCall | None:
    """`call` with the strides of `results`, its first ones, for its outputs; None if these are as predicted.

    Decided by facts that are the same on all ranks, since strides decide what later operators do.
    """
    if not call.outputs or call.facts.is_view or call.facts.returns_list:
        return None
    tensors = results if isinstance(results, tuple) else (results,)
    of_zeros = cache(lambda: _results_for_zeros(call))
    outputs = [
        _as_it_is(output, tensor, partial(_at, index, of_zeros)) if written is None else output
        for index, (output, tensor, written) in enumerate(zip(call.outputs, tensors, call.facts.returned, strict=True))
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


def _as_it_is(output: torch.Tensor, result: Any, of_zeros: Callable[[], torch.Tensor]) -> torch.Tensor:
    """`output` with the strides of a result; `of_zeros` gives the result for zeros."""
    spec: Spec | None = getattr(result, "_spec", None)
    if spec is None:
        return output
    strides = _true_strides(spec, result._local_tensor, of_zeros)
    if strides == spec.stride:
        return output
    return torch.empty_strided(spec.shape, strides, dtype=output.dtype, device="meta")


def _true_strides(spec: Spec, part: torch.Tensor, of_zeros: Callable[[], torch.Tensor]) -> tuple[int, ...]:
    """The whole's strides, by those of its part; those of zeros where some rank's part has too few elements to tell."""
    # A gradient that was not asked for is planned without elements, whatever kernels return.
    if part.layout is not torch.strided or part.is_meta or tuple(part.shape) != spec.local_shape:
        return spec.stride
    last = [size - 1 for size in spec.mesh.shape]
    smallest = local_shape(spec.shape, spec.mesh.shape, last, spec.placements)
    if smallest == spec.shape:
        return part.stride()
    if any(least < 2 <= size for least, size in zip(smallest, spec.shape, strict=True)):
        result = of_zeros()
        return result.stride() if result.shape == spec.shape else spec.stride
    is_dense = is_permuted(part.shape, part.stride()) and is_permuted(spec.shape, spec.stride)
    if is_dense and part.stride() == contiguous_strides(part.shape):
        return contiguous_strides(spec.shape)
    if not is_dense or _order(spec.shape, part.stride()) == _order(spec.shape, spec.stride):
        return spec.stride
    return strides_in_order(spec.shape, part.stride())


def _results_for_zeros(call: OpCall) -> Sequence[torch.Tensor]:
    """The kernel's results for zeros in place of the whole operands; the prediction if the kernel can't be run."""
    devices = [spec.mesh.device_type for spec in call.operands if spec is not None]
    operands = tensors_of([*call.arguments, *call.keywords.values()])
    is_small = sum(_extent(operand) for operand in operands) <= MAX_ZEROS
    # A user's operator may have side effects, and a random one would draw numbers.
    if not is_small or call.op.namespace != "aten" or call.facts.is_random or is_traced():
        return call.outputs
    args, kwargs = replaced(call.arguments, call.keywords, [_zeros_like(operand, devices[0]) for operand in operands])
    try:
        results = call.op(*args, **kwargs)
    except Exception:  # noqa: BLE001  some operators refuse zeros, each with an error of its own
        return call.outputs
    return results if isinstance(results, tuple) else (results,)


def _at(index: int, results: Callable[[], Sequence[torch.Tensor]]) -> torch.Tensor:
    return results()[index]


def _extent(tensor: torch.Tensor) -> int:
    """The number of elements that the memory of `tensor` has, gaps included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _zeros_like(tensor: torch.Tensor, device: str) -> torch.Tensor:
    memory = torch.zeros(max(_extent(tensor), 1), dtype=tensor.dtype, device=device)
    return memory.as_strided(tensor.shape, tensor.stride())


def _order(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The dims with more than one element, innermost first."""
    return sorted((dim for dim, size in enumerate(shape) if size > 1), key=lambda dim: strides[dim])
