"""The loss of a model whose forward ends with logits: its head gives the loss in their place, for one call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from disttrain.errors import ShapeError
from disttrain.kernels.cross_entropy.linear import linear_cross_entropy


@contextmanager
def loss_from_head(head: nn.Module, target: torch.Tensor, **options: Any) -> Iterator[None]:
    """Makes `head(hidden)` return the loss of its logits within the block; the logits are not made.

        with kernels.loss_from_head(model.head, targets):
            loss = model(tokens)

    The model must hand on what its head gives. Hooks on the head run, so that `fully_shard` gathers its weight as ever.

    Args:   head  an nn.Linear;  target  (...), as hidden's batch;  options  those of `linear_cross_entropy`.
    Raises: ShapeError where head is no nn.Linear; within, what `linear_cross_entropy` raises.
    """
    if not isinstance(head, nn.Linear):
        problem = f"the head is a {type(head).__name__}."
        raise ShapeError("loss_from_head", problem, "Give the model's last nn.Linear.")

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(hidden, head.weight, target, head.bias, **options)

    # On the module itself, where it comes before its class's; a hook could not keep that from running.
    before = vars(head).get("forward")
    vars(head)["forward"] = forward
    try:
        yield
    finally:
        del vars(head)["forward"]
        if before is not None:
            vars(head)["forward"] = before
