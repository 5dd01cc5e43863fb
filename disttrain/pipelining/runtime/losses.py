"""Results of the last stage: losses, and outputs for who asked for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from disttrain.errors import ScheduleError, ShapeError
from disttrain.pipelining._torch import map_tensors

_OPERATION = "pipelining.step"


class Losses:
    """Of one pass, by microbatch.

    Args: loss_fn    called with output, target and `loss_kwargs`; None: there is no loss;
          targets    of each microbatch;  scale  what each loss counts for in the gradients;
          keeps_outputs  whether `outputs` are wanted;  has_backward  whether losses need a gradient.
    """

    def __init__(
        self,
        loss_fn: Callable[..., torch.Tensor] | None,
        targets: Sequence[Any] | None,
        loss_kwargs: Mapping[str, Any],
        scale: float,
        *,
        keeps_outputs: bool,
        has_backward: bool,
    ) -> None:
        self.losses: dict[int, torch.Tensor] = {}
        self.outputs: dict[int, Any] = {}
        self._loss_fn = loss_fn
        self._targets = targets
        self._loss_kwargs = loss_kwargs
        self._scale = scale
        self._keeps_outputs = keeps_outputs
        self._has_backward = has_backward
        self._root_grad: torch.Tensor | None = None

    def take(self, microbatch: int, output: Any) -> torch.Tensor | None:
        """The loss of what the last stage has returned, with its graph; None without a loss function.

        Raises: ShapeError for a loss that is not one number; ScheduleError for one without a gradient.
        """
        if self._keeps_outputs:
            self.outputs[microbatch] = map_tensors(torch.Tensor.detach, output)
        if self._loss_fn is None or self._targets is None:
            return None
        loss: Any = self._loss_fn(output, self._targets[microbatch], **self._loss_kwargs)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            kind = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ShapeError(_OPERATION, f"loss_fn returns {kind}.", "Return one number, as a tensor.")
        if self._has_backward and not loss.requires_grad:
            raise ScheduleError(
                _OPERATION,
                "the loss has no gradient: it depends on no parameter that is trained.",
                "Call eval, or let a parameter, or loss_fn, keep its gradient.",
            )
        self.losses[microbatch] = loss.detach()
        return loss

    def root_grad(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the gradient that a backward from this loss begins with: one tensor for all losses that are alike."""
        grad = self._root_grad
        if grad is None or type(loss) is not torch.Tensor or grad.shape != loss.shape or grad.dtype != loss.dtype:
            grad = self._root_grad = torch.full_like(loss, self._scale)
        return grad
