"""torch.manual_seed without GPUs."""

from __future__ import annotations

import torch


def seed_no_gpus() -> None:
    """Where torch was built without CUDA, let its seeding do without GPUs.

    It would keep the seed for the time when there are some, and with it, for a message, the text of the stack: that
    takes milliseconds each time, for two kinds of GPU.
    """
    if not torch.backends.cuda.is_built():
        torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = _nothing


def _nothing(seed: int) -> None:
    pass
