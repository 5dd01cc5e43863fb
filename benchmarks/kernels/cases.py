"""The measured cases of each kernel: one step by torch's operators and by ours, and the bytes it has to move."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from disttrain import kernels
from disttrain.kernels.float8.operator import cast
from disttrain.kernels.sparse24.product import Packed24, mask24_of_tiles, sparse24_linear, takes_packed

Step = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """`theirs` and `ours` are called with `inputs`, all with gradients; bytes are those of memory's traffic."""

    name: str
    inputs: Sequence[torch.Tensor]
    theirs: Step
    ours: Step
    forward_bytes: int
    step_bytes: int
    """Of forward and backward; 0, and no flops: it has no backward."""
    flops: int = 0
    """Of forward and backward, where arithmetic bounds them instead."""


def cases(device: torch.device, num_tokens: int, dim: int, vocab_size: int) -> Iterator[Case]:
    """Of a Llama's sizes in bf16; each is made when it comes, so that memory holds one at a time."""

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_()

    for width in (dim, 2 * dim):
        yield from _norms(drawn, num_tokens * dim // width, width)
    yield from _gated(drawn, num_tokens, dim * 7 // 2)
    yield _rotary(drawn, num_tokens, dim // 128)
    yield from _float8(drawn, num_tokens, dim)
    if device.type == "cuda":
        yield from _sparse24(drawn(num_tokens // 2, dim), drawn(dim * 7 // 2, dim))
    hidden, weight = drawn(num_tokens, dim), drawn(vocab_size, dim)
    weight.detach().mul_(dim**-0.5)
    target = torch.randint(0, vocab_size, (num_tokens,), device=device)
    multiplied = 2 * num_tokens * dim * vocab_size
    yield Case(
        f"linear_cross_entropy {num_tokens} x {dim} x {vocab_size}",
        [hidden, weight],
        lambda hidden, weight: F.cross_entropy(F.linear(hidden, weight).float(), target),
        lambda hidden, weight: kernels.linear_cross_entropy(hidden, weight, target),
        0,
        0,
        3 * multiplied,
    )


def _norms(drawn: Callable[..., torch.Tensor], num_rows: int, dim: int) -> Iterator[Case]:
    x, residual, weight, bias = drawn(num_rows, dim), drawn(num_rows, dim), drawn(dim), drawn(dim)
    size = (dim,)

    def added(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
        total = x + residual
        return F.rms_norm(total, size, weight, 1e-5), total

    each = x.nbytes
    yield Case(
        f"rms_norm {num_rows} x {dim}",
        [x, weight],
        lambda x, weight: F.rms_norm(x, size, weight, 1e-5),
        lambda x, weight: kernels.rms_norm(x, weight, 1e-5),
        2 * each,
        5 * each,
    )
    yield Case(
        f"rms_norm + residual {num_rows} x {dim}",
        [x, residual, weight],
        added,
        lambda x, residual, weight: kernels.rms_norm(x, weight, 1e-5, residual=residual),
        4 * each,
        8 * each,
    )
    yield Case(
        f"layer_norm {num_rows} x {dim}",
        [x, weight, bias],
        lambda x, weight, bias: F.layer_norm(x, size, weight, bias),
        kernels.layer_norm,
        2 * each,
        5 * each,
    )


def _gated(drawn: Callable[..., torch.Tensor], num_rows: int, width: int) -> Iterator[Case]:
    gate, up = drawn(num_rows, width), drawn(num_rows, width)
    for name, theirs, ours in (
        ("swiglu", lambda gate, up: F.silu(gate) * up, kernels.swiglu),
        ("geglu", lambda gate, up: F.gelu(gate) * up, kernels.geglu),
    ):
        yield Case(f"{name} {num_rows} x {width}", [gate, up], theirs, ours, 3 * gate.nbytes, 8 * gate.nbytes)


def _rotary(drawn: Callable[..., torch.Tensor], num_tokens: int, num_heads: int) -> Case:
    x = drawn(1, num_tokens, num_heads, 128)
    turns = torch.outer(torch.arange(num_tokens), 10_000 ** -(torch.arange(64) / 64)).to(x.device)
    cos, sin = turns.cos(), turns.sin()

    def theirs(x: torch.Tensor) -> torch.Tensor:
        first, second = x.transpose(1, 2).chunk(2, -1)
        return torch.cat((first * cos - second * sin, first * sin + second * cos), -1).type_as(x)

    return Case(
        f"rotate {num_tokens} x {num_heads} x 128",
        [x],
        theirs,
        lambda x: kernels.rotate(x.transpose(1, 2), cos, sin),
        2 * x.nbytes,
        4 * x.nbytes,
    )


def _float8(drawn: Callable[..., torch.Tensor], num_tokens: int, dim: int) -> Iterator[Case]:
    def by_torch(x: torch.Tensor) -> Any:
        scale = torch.exp2((x.abs().amax().float() / 448).log2().ceil())
        codes = (x / scale).to(torch.float8_e4m3fn)
        return codes, codes.t().contiguous(), scale

    for width in (dim, dim * 7 // 2):
        x = drawn(num_tokens, width)
        # Read twice, and written in half the bytes twice.
        yield Case(
            f"float8 cast {num_tokens} x {width}",
            [x],
            by_torch,
            lambda x: cast(x, torch.float8_e4m3fn, by_rows=False),
            3 * x.nbytes,
            0,
        )
    for width in (dim, dim * 7 // 2):
        x, weight = drawn(num_tokens, dim), drawn(width, dim)
        for recipe in ("tensorwise", "rowwise"):
            yield Case(
                f"float8 linear, {recipe} {num_tokens} x {dim} x {width}",
                [x, weight],
                F.linear,
                lambda x, weight, recipe=recipe: kernels.float8_linear(x, weight, recipe=recipe),
                0,
                0,
                6 * num_tokens * dim * width,
            )


def _sparse24(x: torch.Tensor, weight: torch.Tensor) -> Iterator[Case]:
    """Beside the same product of a dense weight."""
    with torch.no_grad():
        weight *= mask24_of_tiles(weight)
    if takes_packed(weight):
        (num_tokens, in_size), out_size = x.shape, len(weight)
        packed = Packed24(weight)
        yield Case(
            f"sparse24 linear {num_tokens} x {in_size} x {out_size}",
            [x, weight],
            F.linear,
            lambda x, weight: sparse24_linear(x, weight, None, packed),
            0,
            0,
            6 * num_tokens * in_size * out_size,
        )
