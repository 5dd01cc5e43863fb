"""States for the tests of other formats of checkpoints."""

from __future__ import annotations

from typing import Any

import torch

DTYPES = [
    torch.bfloat16,
    torch.bool,
    torch.complex64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int8,
    torch.uint16,
    torch.uint8,
]


def tensors(value: int) -> dict[str, torch.Tensor]:
    """One of each dtype, of a few shapes and strides."""
    named = {f"{dtype}".removeprefix("torch."): torch.full((3, 2), value).to(dtype) for dtype in DTYPES}
    grid = torch.arange(24.0).view(4, 6) * value
    return {**named, "scalar": torch.tensor(1.5 * value), "none": torch.empty(0, 4), "transposed": grid.T,
            "columns": grid[:, ::2], "rows": grid[1:3]}  # fmt: skip


def as_bytes(state: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in state.items()}


def nested(value: int) -> dict[str, Any]:
    return {
        "model": {f"layer.{name}": tensor for name, tensor in tensors(value).items()},
        "step": value,
        "note": "text",
        "ratios": [0.5 * value, None, True, (1, "x"), b"\xff\x00", 1 << 60],
    }
