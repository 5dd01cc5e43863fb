"""Gated linear units' products, SwiGLU and GeGLU: an activation of one tensor times another, as one operator each way.

Forward keeps only the two inputs. Backward computes the activation again, which takes no memory traffic.

Source: Shazeer, "GLU Variants Improve Transformer" (arXiv 2002.05202).
"""

from __future__ import annotations

from typing import Any, Final

import torch

from disttrain.dtensor import Placement, Shard, register_sharding
from disttrain.errors import ShapeError
from disttrain.kernels.choice import choose
from disttrain.kernels.glu import reference as glu_reference
from disttrain.kernels.operators import batch, call, define, differentiate, refuse_second_derivative, reshaped

GELUS: Final = {"none": "gelu", "tanh": "gelu_tanh"}
"""The activation, by what torch calls approximate."""


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """F.silu(gate) * up, computed in fp32 (fp64 of fp64) and rounded once.

    Args:    gate, up  of one shape and dtype; halves of one tensor's last dim are read in place.
    Raises:  ShapeError for tensors that don't fit.
    Gradient: of both, once.
    """
    return _product("swiglu", gate, up, "silu")


def geglu(gate: torch.Tensor, up: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """F.gelu(gate, approximate=approximate) * up; else as `swiglu`."""
    if approximate not in GELUS:
        raise ShapeError("geglu", f"approximate is {approximate!r}.", "Give one of none, tanh.")
    return _product("geglu", gate, up, GELUS[approximate])


def _product(operation: str, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    if gate.shape != up.shape or gate.dtype != up.dtype or not gate.is_floating_point():
        problem = f"gate is {gate.dtype} of shape {tuple(gate.shape)}, up {up.dtype} of {tuple(up.shape)}."
        raise ShapeError(operation, problem, "Give floats of one shape and dtype.")
    return call(GLU, gate, up, activation)  # type: ignore[no-any-return]


def _load() -> Any:
    # Triton is not on every machine, and slow to load.
    from disttrain.kernels.glu import triton_kernels as glu_triton

    return glu_triton


def _kernels(gate: torch.Tensor) -> Any:
    return choose("glu", gate, "", glu_reference, _load, is_fused_when_traced=True)


def _glu(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    result: torch.Tensor = _kernels(gate).forward(*_rows(gate, up), activation)
    return reshaped(result, gate.shape)


def _glu_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_gate, grad_up = _kernels(gate).backward(*_rows(grad, gate, up), activation)
    return reshaped(grad_gate, gate.shape), reshaped(grad_up, gate.shape)


def _rows(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """(rows, D) each, with neighbours along the last dim; a copy only where there is no other way."""
    if tensors[0].dim() < 2 or all(tensor.is_contiguous() for tensor in tensors):
        return [tensor.reshape(1, -1) for tensor in tensors]
    return [(tensor if tensor.stride(-1) == 1 else tensor.contiguous()).flatten(0, -2) for tensor in tensors]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx: Any, grad: torch.Tensor) -> Any:
    return *torch.ops.disttrain.glu_backward(grad, *ctx.saved_tensors, ctx.activation), None


GLU: Final = define(
    "glu(Tensor gate, Tensor up, str activation) -> Tensor",
    _glu,
    lambda gate, *_: gate.new_empty(gate.shape),
    is_traceable=True,
)
GLU_BACKWARD: Final = define(
    "glu_backward(Tensor grad, Tensor gate, Tensor up, str activation) -> (Tensor, Tensor)",
    _glu_backward,
    lambda _, gate, *rest: (gate.new_empty(gate.shape), gate.new_empty(gate.shape)),
    is_traceable=True,
)
differentiate(GLU, _keep, _backward)
refuse_second_derivative(GLU_BACKWARD)
batch(GLU, 2)
batch(GLU_BACKWARD, 3)

Choices = list[tuple[list[Placement | None], list[Placement | None]]]


@register_sharding(GLU)
def _shard_glu(gate: Any, up: Any, activation: str) -> Choices:
    return [([Shard(dim)], [Shard(dim), Shard(dim), None]) for dim in range(gate.ndim)]


@register_sharding(GLU_BACKWARD)
def _shard_glu_backward(grad: Any, gate: Any, up: Any, activation: str) -> Choices:
    return [([Shard(dim)] * 2, [*[Shard(dim)] * 3, None]) for dim in range(gate.ndim)]
