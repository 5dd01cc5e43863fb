"""Maps floats to integers of the same order, for minima and maxima over ranks: backends may lose a NaN, which torch
keeps.

The bits of an IEEE 754 float, read as an integer, increase with positive floats and decrease with negative ones.
Inverting the lower bits of negative ones gives one order for all. Doing so twice restores the bits.
"""

from __future__ import annotations

import torch

_KEYS = {torch.float32: torch.int32, torch.float64: torch.int64}


def order_keys(values: torch.Tensor, *, nan_is_highest: bool) -> torch.Tensor:
    """Integers in the order of floating-point `values`, with not-a-number above all of them, or below."""
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    keys = _turned(wide.contiguous().view(_KEYS[wide.dtype]))
    limits = torch.iinfo(keys.dtype)
    return keys.masked_fill_(wide.isnan(), limits.max if nan_is_highest else limits.min)


def from_order_keys(keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values, of type `dtype`, that `keys` were made of."""
    wide = next(wide for wide, key_dtype in _KEYS.items() if key_dtype == keys.dtype)
    return _turned(keys).view(wide).to(dtype)


def _turned(bits: torch.Tensor) -> torch.Tensor:
    num_bits = bits.dtype.itemsize * 8
    return bits ^ ((bits >> (num_bits - 1)) & torch.iinfo(bits.dtype).max)
