"""Asks torch whether the process that this one was forked from has used its GPUs."""

from __future__ import annotations

import torch


def has_lost_gpus() -> bool:
    """True in a fork that can't use any. To have asked how many GPUs there are is enough for that."""
    return bool(torch.cuda._is_in_bad_fork())
