"""Memory that a training process and its writer share: a file without a name, freed when both have closed it.

On hosts with GPUs it is pinned, so that copies to it run in the background. Source: memfd_create(2).
"""

from __future__ import annotations

import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch

from disttrain.process_group.peers.cuda_driver import hide_from_devices, show_to_devices

_GRAIN_BYTES = 2 << 20
_NUM_TOUCHING = 8


class SharedMemory:
    """Memory for the image of one file, of at least `num_bytes`. Raises OSError or RuntimeError if there is none."""

    def __init__(self, num_bytes: int, *, is_pinned: bool) -> None:
        # Some more: headers and values grow by a few bytes from save to save.
        self.num_bytes = (-(-(num_bytes + num_bytes // 64) // _GRAIN_BYTES) + 1) * _GRAIN_BYTES
        self.descriptor = os.memfd_create("disttrain-save")
        finish = weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, self.num_bytes)
        memory = mmap.mmap(self.descriptor, self.num_bytes)
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without large pages for shared memory
            pass
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        if is_pinned:
            # Several threads allocate the pages by touching them; pinning would use one thread.
            with ThreadPoolExecutor(_NUM_TOUCHING) as pool:
                list(pool.map(torch.Tensor.zero_, self.bytes.chunk(_NUM_TOUCHING)))
            show_to_devices(self.bytes.data_ptr(), self.num_bytes)
            weakref.finalize(self, hide_from_devices, self.bytes.data_ptr()).atexit = False
        finish.atexit = False
