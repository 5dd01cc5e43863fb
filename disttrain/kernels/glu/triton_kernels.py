"""The gated products as Triton kernels; what they compute, and of which arguments, is what `glu/reference.py` does."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from disttrain.kernels._torch import traced

_BLOCK: Final = 1024
"""Elements of a program of 4 warps: 16 bytes per thread in bf16."""


@triton.jit
def _slope_of(gate, ACTIVATION: tl.constexpr):
    """The activation, and its derivative."""
    if ACTIVATION == "silu":
        share = tl.sigmoid(gate)
        slope = share * (1.0 + gate * (1.0 - share))
    elif ACTIVATION == "gelu":
        # 7.1.26 of Abramowitz and Stegun: as near as fp32 tells, and its exponential serves the slope too.
        bell = tl.exp(-0.5 * gate * gate)
        t = 1.0 / (1.0 + 0.23164188394 * tl.abs(gate))
        tail = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
        share = tl.where(gate < 0, tail * bell, 1.0 - tail * bell)
        slope = share + gate * bell * 0.3989422804014327
    else:
        # (1 + tanh(a)) / 2 is sigmoid(2 a).
        share = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
        slope = share + gate * share * (1.0 - share) * 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
    return gate * share, slope


@triton.jit
def _glu_forward(
    gate, up, result, gate_stride, up_stride, row_size, num_blocks, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    begin = (tl.program_id(0) % num_blocks) * BLOCK
    columns = begin + tl.arange(0, BLOCK)
    is_there = columns < row_size
    wide = tl.load(gate + row * gate_stride + columns, mask=is_there, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_stride + columns, mask=is_there, other=0.0).to(tl.float32)
    activated, _ = _slope_of(wide, ACTIVATION)
    tl.store(result + row * row_size + columns, (activated * factor).to(result.dtype.element_ty), mask=is_there)


@triton.jit
def _glu_backward(
    grad,
    gate,
    up,
    grad_gate,
    grad_up,
    grad_stride,
    gate_stride,
    up_stride,
    row_size,
    num_blocks,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    begin = (tl.program_id(0) % num_blocks) * BLOCK
    columns = begin + tl.arange(0, BLOCK)
    is_there = columns < row_size
    wished = tl.load(grad + row * grad_stride + columns, mask=is_there, other=0.0).to(tl.float32)
    wide = tl.load(gate + row * gate_stride + columns, mask=is_there, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_stride + columns, mask=is_there, other=0.0).to(tl.float32)
    activated, slope = _slope_of(wide, ACTIVATION)
    offsets = row * row_size + columns
    tl.store(grad_gate + offsets, (wished * factor * slope).to(grad_gate.dtype.element_ty), mask=is_there)
    tl.store(grad_up + offsets, (wished * activated).to(grad_up.dtype.element_ty), mask=is_there)


def forward(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """The product as in `glu/reference.py`; of 32 bits at most."""
    num_rows, row_size = gate.shape
    result = gate.new_empty(gate.shape)
    num_blocks = triton.cdiv(row_size, _BLOCK)
    with torch.cuda.device_of(gate):
        traced(_glu_forward)[(num_rows * num_blocks,)](
            gate, up, result, gate.stride(0), up.stride(0), row_size, num_blocks, ACTIVATION=activation, BLOCK=_BLOCK
        )
    return result


def backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients as in `glu/reference.py`."""
    num_rows, row_size = gate.shape
    grad_gate, grad_up = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    num_blocks = triton.cdiv(row_size, _BLOCK)
    with torch.cuda.device_of(gate):
        traced(_glu_backward)[(num_rows * num_blocks,)](
            grad,
            gate,
            up,
            grad_gate,
            grad_up,
            grad.stride(0),
            gate.stride(0),
            up.stride(0),
            row_size,
            num_blocks,
            ACTIVATION=activation,
            BLOCK=_BLOCK,
        )
    return grad_gate, grad_up
