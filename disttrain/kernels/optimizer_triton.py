"""An optimizer's step as one Triton launch over all pieces; what it computes is what `optimizer_twin.py` does.

A launch finds its tensors by their addresses, in a table. A program takes a block of one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, Final

import torch
import triton
import triton.language as tl

from disttrain.kernels.optimizer_rules import Piece, Rule

_BLOCK: Final = 1024
_NUM_WARPS: Final = 4
_ALIGNMENT: Final = 16
"""Bytes that a thread reads at once where all addresses, and sizes too, are multiples of it."""
_DTYPES: Final = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


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
def _at(address, DTYPE: tl.constexpr, IS_ALIGNED: tl.constexpr):
    place = tl.load(address).to(tl.pointer_type(DTYPE))
    if IS_ALIGNED:
        place = tl.multiple_of(place, 16)
    return place


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
    HAS_SCALE: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    PARAMETER: tl.constexpr,
    GRAD: tl.constexpr,
    STATE: tl.constexpr,
    IS_RANDOM: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tensor = tl.load(tensors + tl.program_id(0))
    size = tl.load(sizes + tensor)
    if IS_ALIGNED:
        size = tl.multiple_of(size, 16)
    block = tl.load(blocks + tl.program_id(0))
    places = block * BLOCK + tl.arange(0, BLOCK)
    is_there = places < size
    row = table + tensor * 6
    parameter = _at(row, PARAMETER, IS_ALIGNED)
    main = parameter
    if HAS_MASTER:
        main = _at(row + 4, tl.float32, IS_ALIGNED)
    value = tl.load(main + places, mask=is_there, other=0.0).to(tl.float32)
    grad = tl.load(_at(row + 1, GRAD, IS_ALIGNED) + places, mask=is_there, other=0.0).to(tl.float32)
    if HAS_SCALE:
        grad *= tl.load(scale)
    first = tl.zeros((BLOCK,), tl.float32)
    second = first
    if NUM_STATES > 0:
        first = tl.load(_at(row + 2, STATE, IS_ALIGNED) + places, mask=is_there, other=0.0).to(tl.float32)
    if NUM_STATES > 1:
        second = tl.load(_at(row + 3, STATE, IS_ALIGNED) + places, mask=is_there, other=0.0).to(tl.float32)
    value, first, second = _stepped(
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
        KIND,
        IS_NESTEROV,
        NUM_STATES,
    )
    noise = places.to(tl.int32)
    other_noise = noise
    if IS_RANDOM:
        noise, other_noise = _noise(tl.load(row + 5), block, BLOCK)
    if NUM_STATES > 0:
        tl.store(_at(row + 2, STATE, IS_ALIGNED) + places, _rounded(first, noise, STATE), mask=is_there)
        if NUM_STATES > 1:
            tl.store(_at(row + 3, STATE, IS_ALIGNED) + places, _rounded(second, noise >> 16, STATE), mask=is_there)
    if HAS_MASTER:
        tl.store(main + places, value, mask=is_there)
        tl.store(parameter + places, value.to(PARAMETER), mask=is_there)
    else:
        tl.store(parameter + places, _rounded(value, other_noise, PARAMETER), mask=is_there)


def update(pieces: Sequence[Piece], rule: Rule, scale: torch.Tensor | None) -> None:
    """As in `optimizer_twin`; of 32 bits at most."""
    first = pieces[0]
    device = first.parameter.device
    tensors, blocks, sizes = _blocks(tuple(piece.parameter.numel() for piece in pieces), device)
    addresses = [_addresses(piece) for piece in pieces]
    seeds = [piece.seed(rule.step) for piece in pieces]
    rows = [(*own, seed) for own, seed in zip(addresses, seeds, strict=True)]
    table = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    with torch.cuda.device_of(first.parameter):
        _update[(tensors.shape[0],)](
            table,
            tensors,
            blocks,
            sizes,
            table if scale is None else scale,
            rule.lr,
            rule.weight_decay,
            rule.beta1,
            rule.beta2,
            rule.eps,
            rule.correction1,
            rule.correction2,
            KIND=rule.kind,
            IS_NESTEROV=rule.is_nesterov,
            NUM_STATES=len(first.states),
            HAS_SCALE=scale is not None,
            HAS_MASTER=first.master is not None,
            PARAMETER=_DTYPES[first.parameter.dtype],
            GRAD=_DTYPES[first.grad.dtype],
            STATE=_DTYPES[first.states[0].dtype] if first.states else tl.float32,
            IS_RANDOM=first.is_rounded_at_random,
            IS_ALIGNED=_are_aligned(pieces, addresses),
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
        )


def _addresses(piece: Piece) -> list[int]:
    """Of parameter, gradient, two states and the master; 0 for what is not there."""
    states = [state.data_ptr() for state in piece.states]
    master = 0 if piece.master is None else piece.master.data_ptr()
    return [piece.parameter.data_ptr(), piece.grad.data_ptr(), *states, *[0] * (2 - len(states)), master]


def _are_aligned(pieces: Sequence[Piece], rows: Sequence[Sequence[int]]) -> bool:
    sizes = (piece.parameter.numel() for piece in pieces)
    return not any(number % _ALIGNMENT for number in chain(sizes, *rows))


@lru_cache(maxsize=64)
def _blocks(sizes: tuple[int, ...], device: torch.device) -> tuple[Any, Any, Any]:
    """For each program its tensor and which block of it, and each tensor's size; on the device."""
    counts = torch.tensor([triton.cdiv(size, _BLOCK) for size in sizes])
    tensors = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    begins = counts.cumsum(0) - counts
    blocks = torch.arange(len(tensors)) - begins[tensors]
    return tensors.to(device), blocks.to(device), torch.tensor(sizes).to(device)
