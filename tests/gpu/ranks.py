"""How many ranks tests on GPUs have: one for each GPU, or as many as the environment asks for.

    DISTTRAIN_TEST_GPU_RANKS=4 python -m pytest tests/gpu     also where there are two GPUs

Where ranks are more than GPUs, several share one, and NCCL's messages go by sockets: as right as ever, and slow.
"""

from __future__ import annotations

import os
from typing import Final

import pytest
import torch

NUM_GPU_RANKS: Final = int(os.environ.get("DISTTRAIN_TEST_GPU_RANKS", "0")) or max(1, torch.cuda.device_count())

NEEDS_GPU_EACH: Final = pytest.mark.skipif(
    torch.cuda.device_count() < NUM_GPU_RANKS, reason="ranks that share a GPU do not share memory"
)
