"""Memory that ranks which are threads write to, in place of GPUs of one host."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch

from disttrain.process_group import ProcessGroup


class Host:
    """Makes memory for all ranks, each time that all have asked for it."""

    def __init__(self, size: int) -> None:
        self._lock = threading.Lock()
        self._barrier = threading.Barrier(size)
        self._made: list[list[torch.Tensor]] = []
        self._num_made = [0] * size

    def make(self, group: ProcessGroup, device: torch.device, num_bytes: int) -> ThreadMemory:
        number = self._num_made[group.group_rank]
        self._num_made[group.group_rank] += 1
        with self._lock:
            if len(self._made) == number:
                # Garbage, as it is in memory that was used before.
                self._made.append([torch.full((num_bytes,), 0x7F, dtype=torch.uint8) for _ in range(group.group_size)])
        return ThreadMemory(self._made[number], self._barrier)


class ThreadMemory:
    """Every rank's memory, and a barrier of threads."""

    def __init__(self, parts: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self._parts = parts
        self._barrier = barrier

    def of(self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset_bytes: int) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        return self._parts[rank][offset_bytes : offset_bytes + num_bytes].view(dtype).view(*shape)

    def barrier(self, timeout_s: float) -> None:
        self._barrier.wait(timeout_s)
