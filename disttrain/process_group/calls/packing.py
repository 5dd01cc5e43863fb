"""Python values as msgpack, with tensors, arrays, dtypes and tuples: what travels between ranks instead of pickles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgpack
import numpy as np
import torch

from disttrain.errors import ShapeError
from disttrain.process_group.calls import data_classes
from disttrain.process_group.calls.data_classes import Unsendable
from disttrain.process_group.calls.plain_kinds import KINDS

_TENSOR, _ARRAY, _DTYPE, _TUPLE, _KIND, _SCALAR, _DATA_CLASS = 1, 2, 3, 4, 5, 6, 7
_NUMBERS = {kind.of: number for number, kind in enumerate(KINDS)}


def pack(value: Any, *, with_classes: bool = False) -> bytes:
    """`value` as bytes: None, bool, int, float, str, bytes, list, tuple, dict, torch tensors and dtypes, numpy arrays
    and scalars, what `plain_kinds.KINDS` lists, and `with_classes` what `data_classes` takes apart.

    Raises ShapeError for anything else; objects are never pickled.
    """
    try:
        return _packed(value, _extend_by_classes if with_classes else _extend)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        # Also what holds itself, lone surrogates, and tensors without plain memory: sparse, meta.
        raise ShapeError("pack", f"a value cannot travel: {error}.", _remedy(error)) from None


def unpack(data: bytes, *, with_classes: bool = False) -> Any:
    """The value that `pack` was given. Tensors are on the CPU."""
    return _unpacked(data, _restore_by_classes if with_classes else _restore)


Extend = Callable[[Any], msgpack.ExtType]
Restore = Callable[[int, bytes], Any]


def _packed(value: Any, extend: Extend) -> bytes:
    return bytes(msgpack.packb(value, default=extend, strict_types=True))


def _unpacked(data: bytes, restore: Restore) -> Any:
    return msgpack.unpackb(data, ext_hook=restore, strict_map_key=False)


def _extend_by_classes(value: object) -> msgpack.ExtType:
    parts = None if type(value) in _NUMBERS else data_classes.taken_apart(value)
    if parts is not None:
        return msgpack.ExtType(_DATA_CLASS, _packed(parts, _extend_by_classes))
    return _extend(value, _extend_by_classes)


def _restore_by_classes(code: int, data: bytes) -> Any:
    if code == _DATA_CLASS:
        return data_classes.put_together(_unpacked(data, _restore_by_classes))
    return _restore(code, data, _restore_by_classes)


def _extend(value: object, extend: Extend | None = None) -> msgpack.ExtType:
    pack = partial(_packed, extend=extend or _extend)
    # Each of numpy's dtypes has a class of its own.
    number = _NUMBERS.get(np.dtype if isinstance(value, np.dtype) else type(value))
    if number is not None:
        return msgpack.ExtType(_KIND, pack([number, KINDS[number].taken_apart(value)]))
    if isinstance(value, tuple):
        return msgpack.ExtType(_TUPLE, pack(list(value)))
    if isinstance(value, torch.Tensor):
        if hasattr(value, "full_tensor"):
            raise Unsendable("a DTensor is a part on each rank", "Send its full_tensor(), or its to_local().")
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
    raise Unsendable(f"{type(value).__name__} is neither plain, a tensor nor an array", _instead_of(value))


def _restore(code: int, data: bytes, restore: Restore | None = None) -> object:
    unpack = partial(_unpacked, restore=restore or _restore)
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


def _remedy(error: Exception) -> str:
    return error.remedy if isinstance(error, Unsendable) else "Send plain values, tensors or arrays."


def _instead_of(value: object) -> str:
    """The value to send in the place of one that is none of data."""
    if isinstance(value, np.ndarray | np.generic):
        return "Send an array of numbers or texts: one for each field, or value.tolist()."
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        return "Send its state_dict(), and load that there."
    if isinstance(value, BaseException):
        return "Send its text: str(error), or traceback.format_exception(error)."
    if isinstance(value, torch.Generator):
        return "Send its get_state(), and set that there."
    for base in (dict, list, str, bytes, int, float, set):
        if isinstance(value, base):
            return f"Send it as what it is derived from: {base.__name__}(value)."
    if callable(value):
        return "Send its name, and have the function or class on each rank."
    if hasattr(value, "__dict__") and type(value).__module__ != "builtins":
        return "Send its attributes, vars(value), and build it there; a dataclass travels as it is."
    return "Send plain values, tensors or arrays."


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ShapeError("unpack", f"dtype {name!r} is unknown to this torch.", "Use the same torch on both sides.")
    return dtype
