"""Python values as msgpack, with tensors, arrays, dtypes and tuples: what travels between ranks instead of pickles."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import torch

from disttrain.errors import ShapeError
from disttrain.process_group.calls.plain_kinds import KINDS

_TENSOR, _ARRAY, _DTYPE, _TUPLE, _KIND, _SCALAR = 1, 2, 3, 4, 5, 6
_NUMBERS = {kind.of: number for number, kind in enumerate(KINDS)}


def pack(value: Any) -> bytes:
    """`value` as bytes: None, bool, int, float, str, bytes, list, tuple, dict, torch tensors and dtypes, numpy arrays
    and scalars, and what `plain_kinds.KINDS` lists.

    Raises ShapeError for anything else; objects are never pickled.
    """
    try:
        return bytes(msgpack.packb(value, default=_extend, strict_types=True))
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        # Also what holds itself, lone surrogates, and tensors without plain memory: sparse, meta.
        raise ShapeError("pack", f"a value cannot travel: {error}.", "Send plain values, tensors or arrays.") from None


def unpack(data: bytes) -> Any:
    """The value that `pack` was given. Tensors are on the CPU."""
    return msgpack.unpackb(data, ext_hook=_restore, strict_map_key=False)


def _extend(value: object) -> msgpack.ExtType:
    number = _NUMBERS.get(type(value))
    if number is not None:
        return msgpack.ExtType(_KIND, pack([number, KINDS[number].taken_apart(value)]))
    if isinstance(value, tuple):
        return msgpack.ExtType(_TUPLE, pack(list(value)))
    if isinstance(value, torch.Tensor):
        whole = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        # A single element may have any stride, and is contiguous.
        flat = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)
        name = str(value.dtype).removeprefix("torch.")
        return msgpack.ExtType(_TENSOR, pack([name, list(value.shape), flat.numpy().tobytes()]))
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError("a masked array would lose its mask")
    if isinstance(value, np.ndarray) and not value.dtype.hasobject and value.dtype.names is None:
        return msgpack.ExtType(_ARRAY, pack([value.dtype.str, list(value.shape), value.tobytes()]))
    if isinstance(value, np.generic) and not value.dtype.hasobject and value.dtype.names is None:
        return msgpack.ExtType(_SCALAR, pack([value.dtype.str, value.tobytes()]))
    if isinstance(value, torch.dtype):
        return msgpack.ExtType(_DTYPE, str(value).removeprefix("torch.").encode())
    raise TypeError(f"{type(value).__name__} is neither plain, a tensor nor an array")


def _restore(code: int, data: bytes) -> object:
    if code == _TUPLE:
        return tuple(unpack(data))
    if code == _KIND:
        number, parts = unpack(data)
        return KINDS[number].put_together(parts)
    if code == _SCALAR:
        name, raw = unpack(data)
        return np.frombuffer(raw, dtype=np.dtype(name))[0]
    if code == _DTYPE:
        return _dtype(data.decode())
    if code == _TENSOR:
        name, shape, raw = unpack(data)
        flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        return flat.view(_dtype(name)).view(shape)
    if code == _ARRAY:
        name, shape, raw = unpack(data)
        return np.frombuffer(bytearray(raw), dtype=np.dtype(name)).reshape(shape)
    raise ShapeError("unpack", f"extension type {code} is unknown.", "Sender and receiver need the same version.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ShapeError("unpack", f"dtype {name!r} is unknown to this torch.", "Use the same torch on both sides.")
    return dtype
