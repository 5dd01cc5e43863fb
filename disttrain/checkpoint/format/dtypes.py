"""Names of dtypes: torch's in the manifest, safetensors' in the data files."""

from __future__ import annotations

import torch

from disttrain.errors import CheckpointError

_SAFETENSORS = {
    "bfloat16": "BF16",
    "bool": "BOOL",
    "complex64": "C64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "int8": "I8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "uint8": "U8",
}


def dtype_name(dtype: torch.dtype) -> str:
    """Such as `float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The dtype of that name. Raises CheckpointError when this torch has none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or dtype_name(dtype) != name:
        raise CheckpointError("load", f"dtype {name!r} is unknown to torch {torch.__version__}.", "Use a newer torch.")
    return dtype


def safetensors_entry(dtype: str, shape: tuple[int, ...], num_bytes: int) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape in a data file's header. What safetensors has no name for is there as bytes."""
    name = _SAFETENSORS.get(dtype)
    return ("U8", (num_bytes,)) if name is None else (name, shape)


def dtype_of_safetensors(name: str) -> str:
    """torch's name for a dtype of safetensors. Raises ValueError where torch has none."""
    for dtype, other in _SAFETENSORS.items():
        if other == name:
            return dtype
    raise ValueError(f"dtype {name!r}")


def is_safetensors_dtype(dtype: str) -> bool:
    """True if safetensors has a name for this dtype."""
    return dtype in _SAFETENSORS
