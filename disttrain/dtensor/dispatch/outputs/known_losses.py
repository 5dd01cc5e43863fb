"""Results of losses over classes and of bags of embeddings, by formulas, as in `known_results.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from disttrain.dtensor._torch import OpOverload
from disttrain.dtensor.dispatch.outputs.known_pointwise import Result

Results = Sequence[Result] | None


def _likelihood(
    scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignored: int
) -> Results:
    return _of_classes(scores, target, weight, reduction) if scores.ndim == 2 else None


def _likelihood_of_images(
    scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignored: int
) -> Results:
    return _of_classes(scores, target, weight, reduction) if scores.ndim == 4 else None


def _of_classes(scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int) -> Results:
    """Classes are the second dim; the target has the others."""
    shape = (scores.shape[0], *scores.shape[2:])
    if reduction not in (0, 1, 2):
        return None
    if not scores.dtype.is_floating_point or target.dtype is not torch.int64 or tuple(target.shape) != shape:
        return None
    if weight is not None and (tuple(weight.shape) != (scores.shape[1],) or weight.dtype is not scores.dtype):
        return None
    return [(() if reduction else shape, scores.dtype), ((), scores.dtype)]


def _likelihood_backward(
    grad: torch.Tensor,
    scores: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignored: int,
    total_weight: torch.Tensor,
) -> Results:
    losses = _of_classes(scores, target, weight, reduction) if scores.ndim in (2, 4) else None
    if losses is None or (tuple(grad.shape), grad.dtype) != losses[0] or total_weight.ndim:
        return None
    return [(tuple(scores.shape), scores.dtype)]


_ATEN: Final = torch.ops.aten
LOSSES: Final[dict[OpOverload, Callable[..., Results]]] = {
    _ATEN.nll_loss_forward.default: _likelihood,
    _ATEN.nll_loss_backward.default: _likelihood_backward,
    _ATEN.nll_loss2d_forward.default: _likelihood_of_images,
    _ATEN.nll_loss2d_backward.default: _likelihood_backward,
}
