"""What the backward pass of a layer asks for, agreed among ranks.

Rows travel in backward where there is something to give gradients to. That may differ: one rank's tokens or experts are
frozen, another's are not. The one that asks for less would not come, and the other would wait for it.
"""

from __future__ import annotations

from enum import IntEnum

import torch


class Asked(IntEnum):
    """What has a gradient on a rank, of which the lowest asks for most: both ways of rows, one, or none."""

    TOKENS = 0
    EXPERTS = 1
    WEIGHTS = 2
    """Of tokens' experts: no rows travel, but what an activation checkpoint has dropped is computed again, and sent."""
    NOTHING = 3


def asked_for(x: torch.Tensor, weights: torch.Tensor | None, *, trains_experts: bool = False) -> Asked:
    """What this rank's tensors ask for; where gradients are off, no backward will come."""
    if x.requires_grad or not torch.is_grad_enabled():
        return Asked.TOKENS
    if trains_experts:
        return Asked.EXPERTS
    return Asked.WEIGHTS if weights is not None and weights.requires_grad else Asked.NOTHING


def taking_part(x: torch.Tensor, weights: torch.Tensor | None, asked: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Tokens and weights that have gradients, which nobody looks at, where some rank's have such: `asked` of all."""
    if asked == Asked.TOKENS and not x.requires_grad:
        x = x.detach().requires_grad_()
    if asked == Asked.WEIGHTS and weights is not None and not weights.requires_grad:
        weights = weights.detach().requires_grad_()
    return x, weights
