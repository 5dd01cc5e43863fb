"""Memory for what is received: as much as is in use at once, and no more.

A buffer is free again when nothing else holds it: no view, no graph that saved it, no user's hook. So the pool grows to
what the schedule needs, and a tensor that something holds is never overwritten. On CUDA PyTorch's own allocator serves.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from disttrain.pipelining._torch import num_holders

_Kind = tuple[tuple[int, ...], torch.dtype]


class Buffers:
    """Buffers on one device, by shape and dtype."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: defaultdict[_Kind, list[torch.Tensor]] = defaultdict(list)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of this kind whose values don't matter. On CUDA it is free as of the current stream."""
        if self._device.type == "cuda":
            # PyTorch's allocator keeps such memory itself, and knows of streams that still read it.
            return torch.empty(shape, dtype=dtype, device=self._device)
        made = self._made[shape, dtype]
        for index, buffer in enumerate(made):
            if num_holders(buffer) == 1:
                # The buffer taken longest ago is usually the first to be free.
                del made[index]
                made.append(buffer)
                return buffer.view(shape)
        # What is made in inference mode could not be trained with.
        with torch.inference_mode(False):
            buffer = torch.empty(shape, dtype=dtype, device=self._device)
        made.append(buffer)
        return buffer.view(shape)

    @property
    def num_bytes(self) -> int:
        """Of all there are."""
        return sum(buffer.nbytes for made in self._made.values() for buffer in made)

    def clear(self) -> None:
        """Let go of all; whoever holds one keeps it."""
        self._made.clear()
