"""Digests of tensors that should be equal on all ranks, for comparing: each is read once, and nothing is copied.

On CPUs a digest is a hash of the bytes. On GPUs it is a weighted sum of the bytes as integers, computed by kernels that
nobody waits for until the digest is read.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash

_SLICE_ELEMENTS = 4 << 20
"""The bytes that a GPU processes at a time, since products need memory."""

_ON_HOST, _ON_DEVICE = b"h", b"d"
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
"""An odd number far from small ones, so that weights of neighbours differ in all their bits."""


class Digests:
    """Begun at one moment, read later. Tensors with nothing in them have none."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._found = dict.fromkeys(tensors, b"")
        self._pending: list[tuple[list[str], torch.Tensor, torch.cuda.Event]] = []
        on_devices: dict[torch.device, dict[str, torch.Tensor]] = {}
        with torch.no_grad():
            for name, tensor in tensors.items():
                if tensor.numel() and tensor.is_cpu:
                    self._found[name] = _ON_HOST + xxhash.xxh3_64_digest(_as_bytes(tensor).numpy().data)
                elif tensor.numel() and tensor.is_cuda:
                    on_devices.setdefault(tensor.device, {})[name] = weighed(_as_bytes(tensor))
            for device, sums in on_devices.items():
                together = torch.stack([*sums.values()])
                on_host = torch.empty(together.shape, dtype=together.dtype, pin_memory=True)
                on_host.copy_(together, non_blocking=True)
                done = torch.cuda.Event()
                done.record(torch.cuda.current_stream(device))
                self._pending.append(([*sums], on_host, done))

    def read(self) -> dict[str, bytes]:
        """The digests by name. Waits for the devices."""
        for names, on_host, done in self._pending:
            done.synchronize()
            for name, number in zip(names, on_host.tolist(), strict=True):
                self._found[name] = _ON_DEVICE + number.to_bytes(8, "little", signed=True)
        self._pending.clear()
        return self._found


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A single element may have any stride, and is contiguous.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def weighed(data: torch.Tensor) -> torch.Tensor:
    """The digest of bytes: the sum of each number times a weight of its position, so that positions count; by
    slices."""
    numbers = data.view(torch.int64) if data.numel() % 8 == 0 and data.storage_offset() % 8 == 0 else data
    weights = _weights(min(_SLICE_ELEMENTS, numbers.numel()), data.device)
    sums = [(part * weights[: len(part)]).sum() for part in numbers.split(_SLICE_ELEMENTS)]
    together: torch.Tensor = torch.stack(sums) * _weights(len(sums), data.device)
    return together.sum()


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers, by which multiplication modulo a power of two loses no bits."""
    return torch.arange(1, 2 * count, 2, device=device) * _FACTOR
