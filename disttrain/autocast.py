"""Tells whether torch.autocast is on for a device, for code that computes in other ways than by torch's operators."""

from __future__ import annotations

import torch


def is_within_autocast(device: torch.device) -> bool:
    """False of meta, which has no autocast: torch raises when it is asked."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)
