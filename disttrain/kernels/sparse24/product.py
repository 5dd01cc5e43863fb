"""Products with 2:4 sparse weights by cuSPARSELt, at forward and for the input's gradient.

A GPU skips the zeros of its first operand, along the dim that is summed over. So forward uses the packed weight, and
the input's gradient the packed transpose, which has two zeros of each four too if masks are chosen for tiles of 4 x 4.
The weight's own gradient has no sparse operand.

Packing takes as long as a product. The optimizer packs once after each step. The layer holds the packed weight, and the
version of the weight that it was packed from; a weight of any other version is multiplied as it is.

Source: Hubara et al., "Accelerated Sparse Neural Training" (arXiv 2102.08124).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any, Final

import torch
import torch.nn.functional as F

from disttrain.autocast import is_within_autocast
from disttrain.kernels._torch import multiply24, pack24, search24, stamp_of
from disttrain.kernels.linear_backward import note_parameters, parameter_grads, refuse_create_graph
from disttrain.kernels.operators import define, refuse_transforms
from disttrain.weight_grads import Grads

TILE: Final = 4
_LINE: Final = 16
"""Sizes of weights are multiples of it; numbers of rows of what is multiplied of half of it."""

_NUM_ROUNDS: Final = 5
_TILES_AT_ONCE: Final = 1 << 20


def mask24_of_tiles(weight: torch.Tensor) -> torch.Tensor:
    """True for two of each row and of each column of 4 x 4 tiles of the matrix: those of the largest sum, exactly."""
    num_rows, num_columns = weight.shape[0] // TILE, weight.shape[1] // TILE
    tiles = weight.abs().view(num_rows, TILE, num_columns, TILE).transpose(1, 2).reshape(-1, TILE * TILE)
    patterns = _patterns(weight.device)
    chosen = [(part.float() @ patterns.T).argmax(1) for part in tiles.split(_TILES_AT_ONCE)]
    mask = patterns.bool()[torch.cat(chosen)].view(num_rows, num_columns, TILE, TILE)
    return mask.transpose(1, 2).reshape(weight.shape)


@cache
def _patterns(device: torch.device) -> torch.Tensor:
    """The 90 tiles (90, 16) of zeros and ones that have two ones in each row and each column."""
    rows = [row for row in product((0.0, 1.0), repeat=TILE) if sum(row) == TILE // 2]
    tiles = [
        tile
        for tile in product(rows, repeat=TILE)
        if all(sum(column) == TILE // 2 for column in zip(*tile, strict=True))
    ]
    return torch.tensor(tiles, device=device).flatten(1)


def takes_tiles(weight: torch.Tensor) -> bool:
    """True if a weight's sizes are those of sparse products."""
    return weight.shape[0] % _LINE == 0 and weight.shape[1] % _LINE == 0


def takes_packed(weight: torch.Tensor) -> bool:
    """True if the weight can be multiplied sparse on its device."""
    is_half = weight.dtype in (torch.bfloat16, torch.float16)
    return takes_tiles(weight) and is_half and weight.is_cuda and _has_library(weight.device)


@cache
def _has_library(device: torch.device) -> bool:
    return torch.backends.cusparselt.is_available() and torch.cuda.get_device_capability(device) >= (8, 0)


class Packed24:
    """A sparse weight and its transpose, packed, and which of the weight's versions that was."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.transposed = pack24(weight.detach()), pack24(weight.detach().t().contiguous())
        self.stamp = torch.tensor(stamp_of(weight))

    def holds(self, weight: torch.Tensor) -> bool:
        """True if it can hold the weight as it is now: converted to another dtype, packed bits mean nothing."""
        return (self.weight.dtype, self.weight.device) == (weight.dtype, weight.device)

    def update(self, weight: torch.Tensor) -> None:
        """Packs the weight in place, where graphs look for it."""
        if self.stamp.tolist() == stamp_of(weight):
            return
        self.weight.copy_(pack24(weight.detach()))
        self.transposed.copy_(pack24(weight.detach().t().contiguous()))
        self.stamp.copy_(torch.tensor(stamp_of(weight)))


def sparse24_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, packed: Packed24) -> torch.Tensor:
    """F.linear(x, weight, bias) with the weight's zeros left out, where that is faster and `packed` is of the weight.

    Args:    x  (..., K), of the weight's dtype or within autocast to it;  weight  (N, K).
    Returns: (..., N).
    Gradient: of all three, once.
    """
    if is_within_autocast(x.device):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if x.dtype != weight.dtype:
        return F.linear(x, weight, bias)
    refuse_transforms("sparse24_linear")
    rows = x.reshape(-1, x.shape[-1])
    result: torch.Tensor = _Sparse24Linear.apply(  # type: ignore[no-untyped-call]
        rows, weight, bias, packed.weight, packed.transposed, packed.stamp
    )
    return result.view(*x.shape[:-1], len(weight))


class _Sparse24Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        packed: torch.Tensor,
        transposed: torch.Tensor,
        stamp: torch.Tensor,
    ) -> torch.Tensor:
        result: torch.Tensor = torch.ops.disttrain.sparse24_mm(x, weight, packed, stamp, False)
        if bias is not None:
            result = result + bias
        ctx.save_for_backward(x, weight, transposed, stamp)
        note_parameters(ctx, weight, bias)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        refuse_create_graph("SparseLinear", "dense products")
        x, weight, transposed, stamp = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        x_grad = torch.ops.disttrain.sparse24_mm(grad, weight, transposed, stamp, True) if needs_x else None

        def compute() -> Grads:
            return grad.t() @ x if needs_weight else None, grad.sum(0) if needs_bias else None

        return x_grad, *parameter_grads(ctx, compute), None, None, None


def _multiply(
    x: torch.Tensor, weight: torch.Tensor, packed: torch.Tensor, stamp: torch.Tensor, is_transposed: bool
) -> torch.Tensor:
    """x (R, K) by the weight (N, K): (R, N); with its transpose x (R, N): (R, K)."""
    factor = weight if is_transposed else weight.t()
    if stamp_of(weight) != stamp.tolist() or len(x) % (_LINE // 2) or not len(x):
        return x @ factor
    algorithm = _ALGORITHMS.of(x.device, x.dtype, len(x), *factor.shape)
    return x @ factor if algorithm is None else multiply24(packed, x.contiguous(), algorithm)


def _shapes(x: torch.Tensor, weight: torch.Tensor, packed: Any, stamp: Any, is_transposed: bool) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[1 if is_transposed else 0]))


define(
    "sparse24_mm(Tensor x, Tensor weight, Tensor packed, Tensor stamp, bool is_transposed) -> Tensor",
    _multiply,
    _shapes,
)


class _Algorithms:
    """cuSPARSELt's best for each product, or None where a dense one is as fast; measured once by this process."""

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], int | None] = {}

    def of(self, device: torch.device, dtype: torch.dtype, num_rows: int, in_size: int, out_size: int) -> int | None:
        call = device, dtype, num_rows, in_size, out_size
        if call not in self._found:
            if torch.cuda.is_current_stream_capturing():
                return None
            self._found[call] = _measured(*call)
        return self._found[call]


_ALGORITHMS: Final = _Algorithms()


def _measured(device: torch.device, dtype: torch.dtype, num_rows: int, in_size: int, out_size: int) -> int | None:
    """Measures a sparse product on random matrices. Returns its algorithm; None where a dense product is as fast."""
    with torch.cuda.device(device):
        x = torch.randn(num_rows, in_size, device=device, dtype=dtype)
        weight = torch.randn(out_size, in_size, device=device, dtype=dtype)
        weight *= torch.tensor([1, 1, 0, 0], device=device).repeat(in_size // TILE)
        try:
            packed = pack24(weight)
            algorithm = search24(packed, x)
            multiply24(packed, x, algorithm)
        except RuntimeError:
            return None  # the library takes no such sizes on this GPU
        dense, sparse = partial(torch.mm, x, weight.t()), partial(multiply24, packed, x, algorithm)
        return algorithm if _is_faster(sparse, dense) else None


def _is_faster(first: Callable[[], Any], second: Callable[[], Any]) -> bool:
    """True if the first is faster; they are timed in turn."""
    times: tuple[list[float], list[float]] = [], []
    for _ in range(_NUM_ROUNDS):
        for run, samples in zip((first, second), times, strict=True):
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            run()
            run()
            ended.record()
            ended.synchronize()
            samples.append(begun.elapsed_time(ended))
    return statistics.median(times[0]) < statistics.median(times[1])
