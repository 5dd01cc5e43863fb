"""An optimizer's step as one Triton launch over all pieces; what it computes is what `optimizers/reference.py` does.

A launch finds its tensors by their addresses, in a table. A program takes a block of one of them. The rule's numbers
lie on the device too: in the table's last row or, in a CUDA graph, where each replay finds those of its own step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl

from disttrain.kernels.launch_table import DTYPES, are_multiples, at, blocks_of, table_of
from disttrain.kernels.optimizers.rules import Piece, Rule, numbers_of

_BLOCK: Final = 1024
_NUM_WARPS: Final = 4


@triton.jit
def _rounded(value, noise, DTYPE: tl.constexpr):
    if tl.bfloat16 == DTYPE:
        bits = value.to(tl.int32, bitcast=True)
        near = ((bits + (noise & 0xFFFF)) & -65536).to(tl.float32, bitcast=True)
        value = tl.where((value == value) & (tl.abs(value) != float("inf")), near, value)
    return value.to(DTYPE)


@triton.jit
def _noise(seed, block, BLOCK: tl.constexpr):
    """Twice 32 random bits for each place of a block: a call of Philox (Salmon et al., SC 2011) serves two places."""
    pairs = (block * (BLOCK // 2) + tl.arange(0, BLOCK // 2)).to(tl.int32)
    first, second, third, fourth = tl.randint4x(seed, pairs, n_rounds=7)
    return (
        tl.interleave(first, second).to(tl.int32, bitcast=True),
        tl.interleave(third, fourth).to(tl.int32, bitcast=True),
    )


@triton.jit
def _seed(piece, step):
    """`Piece.seed`."""
    low = (piece * 0x9E3779B1 + step * 0x85EBCA77) & 0xFFFFFFFF
    return (step << 32) | low


@triton.jit
def _stepped(
    value,
    grad,
    first,
    second,
    lr,
    weight_decay,
    beta1,
    beta2,
    eps,
    correction1,
    correction2,
    KIND: tl.constexpr,
    IS_NESTEROV: tl.constexpr,
    NUM_STATES: tl.constexpr,
):
    """The new value and states."""
    if KIND == "adamw":
        first = first * beta1 + grad * (1.0 - beta1)
        second = second * beta2 + grad * grad * (1.0 - beta2)
        value *= 1.0 - lr * weight_decay
        value -= lr * (first / correction1) / (tl.sqrt(second) / correction2 + eps)
    elif KIND == "lion":
        mixed = first * beta1 + grad * (1.0 - beta1)
        first = first * beta2 + grad * (1.0 - beta2)
        value *= 1.0 - lr * weight_decay
        value -= lr * (tl.where(mixed > 0, 1.0, 0.0) - tl.where(mixed < 0, 1.0, 0.0))
    else:
        grad += value * weight_decay
        if NUM_STATES > 0:
            first = first * beta1 + grad
            grad = grad + first * beta1 if IS_NESTEROV else first
        value -= lr * grad
    return value, first, second


@triton.jit
def _update(
    table,
    tensors,
    blocks,
    sizes,
    scale,
    numbers,
    KIND: tl.constexpr,
    IS_NESTEROV: tl.constexpr,
    NUM_STATES: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    HAS_COPY: tl.constexpr,
    PARAMETER: tl.constexpr,
    GRAD: tl.constexpr,
    STATE: tl.constexpr,
    COPY: tl.constexpr,
    IS_RANDOM: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tensor = tl.load(tensors + tl.program_id(0))
    size = tl.load(sizes + tensor)
    if IS_ALIGNED:
        size = tl.multiple_of(size, 16)
    block = tl.load(blocks + tl.program_id(0)).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    is_there = offsets < size
    row = table + tensor * 7
    floats = (numbers + 1).to(tl.pointer_type(tl.float32))
    parameter = at(row, PARAMETER, IS_ALIGNED)
    main = parameter
    if HAS_MASTER:
        main = at(row + 4, tl.float32, IS_ALIGNED)
    value = tl.load(main + offsets, mask=is_there, other=0.0).to(tl.float32)
    grad = tl.load(at(row + 1, GRAD, IS_ALIGNED) + offsets, mask=is_there, other=0.0).to(tl.float32)
    if HAS_SCALE:
        grad *= tl.load(scale)
    first = tl.zeros((BLOCK,), tl.float32)
    second = first
    if NUM_STATES > 0:
        first = tl.load(at(row + 2, STATE, IS_ALIGNED) + offsets, mask=is_there, other=0.0).to(tl.float32)
    if NUM_STATES > 1:
        second = tl.load(at(row + 3, STATE, IS_ALIGNED) + offsets, mask=is_there, other=0.0).to(tl.float32)
    value, first, second = _stepped(
        value,
        grad,
        first,
        second,
        tl.load(floats),
        tl.load(floats + 1),
        tl.load(floats + 2),
        tl.load(floats + 3),
        tl.load(floats + 4),
        tl.load(floats + 5),
        tl.load(floats + 6),
        KIND,
        IS_NESTEROV,
        NUM_STATES,
    )
    noise = offsets.to(tl.int32)
    other_noise = noise
    if IS_RANDOM:
        noise, other_noise = _noise(_seed(tl.load(row + 6), tl.load(numbers)), block, BLOCK)
    if NUM_STATES > 0:
        tl.store(at(row + 2, STATE, IS_ALIGNED) + offsets, _rounded(first, noise, STATE), mask=is_there)
        if NUM_STATES > 1:
            tl.store(at(row + 3, STATE, IS_ALIGNED) + offsets, _rounded(second, noise >> 16, STATE), mask=is_there)
    if HAS_MASTER:
        tl.store(main + offsets, value, mask=is_there)
        tl.store(parameter + offsets, value.to(PARAMETER), mask=is_there)
    else:
        tl.store(parameter + offsets, _rounded(value, other_noise, PARAMETER), mask=is_there)
    if HAS_COPY:
        tl.store(at(row + 5, COPY, IS_ALIGNED) + offsets, value.to(COPY), mask=is_there)


def update(
    pieces: Sequence[Piece], rule: Rule, scale: torch.Tensor | None, numbers: torch.Tensor | None = None
) -> None:
    """Updates as in `optimizers/reference.py`; of 32 bits at most. `numbers` (ROW,) int64: those of the rule are read
    from there, as `numbers_of` puts them; None: they go along."""
    first = pieces[0]
    device = first.parameter.device
    numels = tuple([piece.parameter.numel() for piece in pieces])
    tensors, blocks, sizes = blocks_of(numels, _BLOCK, device)
    rows = [*map(_row_of, pieces)]
    table = table_of([*rows, numbers_of(rule)], device)
    with torch.cuda.device_of(first.parameter):
        _update[(tensors.shape[0],)](
            table,
            tensors,
            blocks,
            sizes,
            table if scale is None else scale,
            table[-1] if numbers is None else numbers,
            KIND=rule.kind,
            IS_NESTEROV=rule.is_nesterov,
            NUM_STATES=len(first.states),
            HAS_SCALE=scale is not None,
            HAS_MASTER=first.master is not None,
            HAS_COPY=first.copy is not None,
            PARAMETER=DTYPES[first.parameter.dtype],
            GRAD=DTYPES[first.grad.dtype],
            STATE=DTYPES[first.states[0].dtype] if first.states else tl.float32,
            COPY=tl.float32 if first.copy is None else DTYPES[first.copy.dtype],
            IS_RANDOM=first.is_rounded_at_random,
            IS_ALIGNED=are_multiples([numels, *[*zip(*rows, strict=True)][:-1]]),
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
        )


def _row_of(piece: Piece) -> tuple[int, ...]:
    """The addresses of parameter, gradient, two states, the master and a copy, 0 for what is not there; the number."""
    states, master, copy = piece.states, piece.master, piece.copy
    return (
        piece.parameter.data_ptr(),
        piece.grad.data_ptr(),
        states[0].data_ptr() if states else 0,
        states[1].data_ptr() if len(states) > 1 else 0,
        0 if master is None else master.data_ptr(),
        0 if copy is None else copy.data_ptr(),
        piece.number,
    )
