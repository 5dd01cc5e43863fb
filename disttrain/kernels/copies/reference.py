"""Copies by torch's operators, for CPUs and fp64; they judge the kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from disttrain.kernels._torch import copy_each


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], scale: torch.Tensor | None) -> None:
    """Write each source to its target, in the target's dtype, and multiplied by `scale` ()."""
    if scale is None:
        copy_each(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        torch.mul(source, scale, out=target)
