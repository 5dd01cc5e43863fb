"""Emulates the reductions that a transport lacks by those that it has: a plan first, tensors later.

The plan follows from dtype and operation alone. All ranks know both, so all of them refuse, or none does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from disttrain.errors import ShapeError
from disttrain.process_group._c10d import ReduceOp, Reduction, reduction_factor, reduction_kind

FOLDS: dict[ReduceOp.RedOpType, Callable[..., torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PREMUL_SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
"""Combines the tensors of two ranks. An average's sum is still to be divided, factors have been multiplied by."""
_BITWISE = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})
_OF_COMPLEX = frozenset({ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM})
_EXTREME = frozenset({ReduceOp.MIN, ReduceOp.MAX})
_ORDERED = frozenset({ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG})

# A bool is a byte of 0 or 1, of which these leave 0 or 1 again.
_OF_BOOL = {
    ReduceOp.SUM: ReduceOp.MAX,
    ReduceOp.PRODUCT: ReduceOp.MIN,
    ReduceOp.MIN: ReduceOp.MIN,
    ReduceOp.MAX: ReduceOp.MAX,
    ReduceOp.BAND: ReduceOp.MIN,
    ReduceOp.BOR: ReduceOp.MAX,
}
# In the wider type nothing overflows that would not in the narrow one, and what overflows there comes out the same.
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}


@dataclass(frozen=True)
class Natives:
    """The reductions that a transport has: dtypes; those of them with AVG, and with PREMUL_SUM; and whether bitwise."""

    dtypes: frozenset[torch.dtype]
    averages: frozenset[torch.dtype]
    premultiplies: frozenset[torch.dtype]
    is_bitwise: bool
    keeps_nans: bool = True
    """False: the least or greatest of some numbers may be one of them where another is NaN."""


@dataclass(frozen=True)
class Emulation:
    """A reduction that the transport lacks, by one that it has: in `dtype`, by `op`, with work before and after."""

    dtype: torch.dtype
    op: Reduction
    is_converted: bool = False
    """True: values of another type; False: the same bits, seen as `dtype`."""
    factor: Any = None
    divides: bool = False
    is_ordered: bool = False
    """Floating-point values as integers in the same order, with NaN at the end that wins."""

    def only_views(self, op: Reduction) -> bool:
        """True where the transport reduces the same memory by the same `op`, with nothing to do before or after."""
        return self.op == op and not self.is_converted and not self.divides and self.factor is None

    def seen(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` as the transport gets it: a view of it, or a copy where values are converted."""
        if tensor.dtype == self.dtype:
            return tensor
        if self.is_ordered:
            return _ordered(tensor, self.dtype, self.op)
        if self.is_converted:
            return tensor.to(self.dtype)
        return torch.view_as_real(tensor) if tensor.is_complex() else tensor.view(self.dtype)

    def multiplied(self, seen: torch.Tensor) -> torch.Tensor:
        """This rank's contribution; the caller's values stay as they are."""
        return seen if self.factor is None else seen * self.factor

    def finish(self, seen: torch.Tensor, tensor: torch.Tensor, group_size: int) -> list[torch.Tensor]:
        """Make `tensor` of what the transport has left in `seen`; return what was written to."""
        if self.divides:
            if seen.is_floating_point():
                seen.div_(group_size)
            else:
                seen.div_(group_size, rounding_mode="trunc")
        if self.is_ordered:
            tensor.copy_(_swapped(seen).view(_FLOAT_OF[self.dtype]))
        elif self.is_converted:
            tensor.copy_(seen)
        return [tensor]


_FLOAT_OF = {torch.int32: torch.float32, torch.int64: torch.float64}


def _ordered(tensor: torch.Tensor, dtype: torch.dtype, op: Reduction) -> torch.Tensor:
    """Integers that are in order as the values are: NaN last for MAX, and first for MIN."""
    ends = torch.iinfo(dtype)
    integers = _swapped(tensor.detach().to(_FLOAT_OF[dtype]).view(dtype))
    return integers.masked_fill_(tensor.isnan(), ends.max if op == ReduceOp.MAX else ends.min)


def _swapped(bits: torch.Tensor) -> torch.Tensor:
    """The bits of negative numbers, which as integers are in the other order, but for the sign; its own inverse."""
    ends = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (ends.bits - 1)) & ends.max)


def check_reducible(operation: str, dtype: torch.dtype, op: Reduction, rank: int) -> None:
    """Raise ShapeError for what means nothing on any transport."""
    kind = reduction_kind(op)
    is_number = dtype.is_floating_point or dtype.is_complex
    refused = (
        (kind in _BITWISE and is_number)
        or (dtype.is_complex and kind not in _OF_COMPLEX)
        or (dtype == torch.bool and kind in {ReduceOp.AVG, ReduceOp.PREMUL_SUM})
        or (kind == ReduceOp.PREMUL_SUM and not is_number)
    )
    if refused:
        name = "complex numbers" if dtype.is_complex else _short(dtype)
        raise ShapeError(
            operation,
            f"{kind.name} of {name} has no meaning; {operation} does not support it.",
            "Choose another operation or dtype.",
            rank=rank,
        )


def emulation_for(
    operation: str, dtype: torch.dtype, op: Reduction, natives: Natives, backend_name: str, rank: int
) -> Emulation | None:
    """The emulation of reducing `dtype` by `op`; None where the transport has that reduction.

    Raises ShapeError, alike on all ranks, for what cannot be done soundly.
    """
    if op == ReduceOp.SUM and dtype in natives.dtypes and dtype != torch.bool:
        return None
    check_reducible(operation, dtype, op, rank)
    kind: Any = reduction_kind(op)
    seen, is_converted = dtype, False
    if dtype == torch.bool:
        # A transport that knows bool would have to keep it at 0 and 1; bytes need no such promise.
        seen, kind = torch.uint8, _OF_BOOL.get(kind, kind)
    elif dtype.is_complex:
        seen = dtype.to_real()
    elif dtype not in natives.dtypes and dtype in _WIDER:
        seen, is_converted = _WIDER[dtype], True
    elif dtype == torch.uint64 and kind not in _ORDERED:
        seen = torch.int64
    elif kind in _EXTREME and dtype.is_floating_point and dtype in natives.dtypes and not natives.keeps_nans:
        return Emulation(torch.int64 if dtype == torch.float64 else torch.int32, kind, True, is_ordered=True)
    is_lacking = seen not in natives.dtypes or (kind in _BITWISE and not natives.is_bitwise)
    if is_lacking:
        raise ShapeError(
            operation,
            f"{backend_name} cannot reduce {_short(dtype)} by {reduction_kind(op).name}.",
            "Convert it to float32, float64, int32 or int64 first.",
            rank=rank,
        )
    if kind == ReduceOp.AVG and seen not in natives.averages:
        return Emulation(seen, ReduceOp.SUM, is_converted, divides=True)
    if kind == ReduceOp.PREMUL_SUM:
        if seen in natives.premultiplies:
            return None if seen == dtype else Emulation(seen, op)
        return Emulation(seen, ReduceOp.SUM, factor=reduction_factor(op))
    return None if seen == dtype else Emulation(seen, kind, is_converted)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
