"""Marks within a CUDA graph that show how far the device is in each replay.

An event would not do: launches run ahead of the device, and each makes the same events anew. A mark is a kernel of one
thread, which writes the number of the replay to memory of the host, so that to read it asks nothing of the driver.
"""

from __future__ import annotations

import logging
import weakref
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, Final

import torch

from disttrain.dtensor._torch import off_the_record

_log = logging.getLogger(__name__)

_NUM_ALIGNMENTS: Final = 4
MAX_MARKS: Final = 4096
"""Of one graph; what comes behind is known by its end only."""


def graph_progress(device: torch.device) -> GraphProgress | None:
    """Marks for a new graph; None where the device has no access to the host's memory."""
    try:
        return GraphProgress(device)
    except RuntimeError as problem:
        _log.warning("the flight recorder cannot mark the operations of a recorded step: %s", str(problem))
        return None


class GraphProgress:
    """As `listing.Progress`, of a graph on `device`. Raises RuntimeError where the host's memory can't be had."""

    def __init__(self, device: torch.device) -> None:
        # Plain tensors, which graphs of any mode may write to.
        with torch.inference_mode(False), torch.no_grad(), off_the_record():
            index = torch.cuda.current_device() if device == torch.device("cuda") else device.index
            unused = _UNUSED.setdefault(index, [])
            self._memory = unused.pop() if unused else _Memory(torch.device("cuda", index))
            self._memory.clear()
        # A graph may still run when its last reference is gone: its memory serves the next graphs, and nothing else.
        weakref.finalize(self, unused.append, self._memory).atexit = False

    def begin_graph(self) -> None:
        with suppress(RuntimeError), torch.no_grad(), off_the_record():
            self._memory.replay.add_(1)

    def comes(self, index: int) -> bool:
        return index < MAX_MARKS and self._write(1 + index)

    def end_graph(self) -> None:
        self._write(0)

    def read(self) -> list[int]:
        numbers: list[int] = self._memory.host.tolist()
        return numbers

    def _write(self, index: int) -> bool:
        try:
            with torch.no_grad(), off_the_record():
                self._memory.write(index)
        except RuntimeError:
            return False  # The recording has failed, as the operation itself will say.
        return True


class _Memory:
    """Numbers on the host, which the device sees, and the number of the replay on the device."""

    def __init__(self, device: torch.device) -> None:
        self.host = torch.zeros(1 + MAX_MARKS, dtype=torch.int32, device="cpu", pin_memory=True)
        self.replay = torch.zeros(1, dtype=torch.int32, device=device)
        self.seen = torch.as_tensor(_seen_by_gpu(self.host), device=self.replay.device)
        if self.seen.data_ptr() != self.host.data_ptr():
            raise RuntimeError("torch has copied the memory")

    def clear(self) -> None:
        """Not beside a graph that writes there: before a recording, the device is waited for."""
        self.host.zero_()
        self.replay.zero_()
        # Kernels are loaded by their first launch, which must not be a part of a graph: one for each alignment.
        self.replay.add_(0)
        for index in range(_NUM_ALIGNMENTS):
            self.write(index)

    def write(self, index: int) -> None:
        """Have the device write the number of the replay there."""
        torch.add(self.replay, 0, out=self.seen[index : index + 1])


def _seen_by_gpu(host: torch.Tensor) -> Any:
    """Pinned memory of the host as an array of a GPU, which has it under the same address.

    CUDA C++ Programming Guide, "Unified Virtual Address Space"; Numba, "CUDA Array Interface".
    """
    address = host.data_ptr(), False
    described = {"shape": tuple(host.shape), "typestr": "<i4", "data": address, "version": 2}
    return SimpleNamespace(__cuda_array_interface__=described)


_UNUSED: Final[dict[int, list[_Memory]]] = {}
"""Of graphs that are gone, by GPU."""
