"""Parts that backward passes of our own linear products share: who may keep parameters' gradients, and what is
refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from disttrain.errors import LayoutError
from disttrain.weight_grads import Grads, current_keeper, now_or_later


def note_parameters(ctx: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Notes, in a forward of (x, weight, bias, ...), whose gradients may wait. In a graph none may, it holds all of a
    step."""
    ctx.keeper, ctx.parameters = None, (None, None)
    if not torch.compiler.is_compiling():
        ctx.keeper, ctx.parameters = current_keeper(), (weight, bias)


def refuse_create_graph(name: str, remedy: str) -> None:
    """Raises LayoutError, in a backward without a derivative of its own, where one is asked for."""
    if torch.is_grad_enabled():
        problem = "its backward is asked for its own derivative (create_graph=True)."
        raise LayoutError(name, problem, f"Leave create_graph out, or use {remedy}.")


def parameter_grads(ctx: Any, compute: Callable[[], Grads]) -> Grads:
    """The gradients of weight and bias in a backward, by `compute` now, or Nones where somebody keeps it for later."""
    if ctx.keeper is None:
        return compute()
    needed = zip(ctx.parameters, ctx.needs_input_grad[1:3], strict=True)
    return now_or_later(ctx.keeper, [parameter if is_needed else None for parameter, is_needed in needed], compute)
