"""loss_parallel: within it F.cross_entropy of DTensors cut along their classes is the vocabulary-parallel loss.

Without it such a loss is right as well, and gathers nothing: DTensor's rules for log_softmax and nll_loss share maxima
and sums. But they take four small collectives, in forward and backward, and write the logarithms of all probabilities;
no rule sees both operators together, for autograd takes cross_entropy apart before DTensor hears of it. So this looks
at the call before autograd does. Nothing is kept for backward, which may run anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from disttrain.dtensor import DTensor
from disttrain.tp.loss.checks import LossOptions
from disttrain.tp.loss.dtensors import is_cut_along_classes, loss_of_dtensor


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Within this F.cross_entropy and nn.CrossEntropyLoss take DTensors cut along their classes as
    `vocab_parallel_cross_entropy` does: one collective, no temporaries of the logits' size, a loss of fp32.

    The target may be a plain tensor there. All other calls do what they do outside; backward needs no context.
    """
    with _Mode():
        yield


class _Mode(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.cross_entropy:
            bound = _SIGNATURE.bind(*args, **kwargs or {})
            bound.apply_defaults()
            loss = _parallel_loss(**bound.arguments)
            if loss is not None:
                return loss
        return func(*args, **kwargs or {})


_SIGNATURE: Final = signature(F.cross_entropy)


def _parallel_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    size_average: bool | None,
    ignore_index: int,
    reduce: bool | None,
    reduction: str,
    label_smoothing: float,
) -> torch.Tensor | None:
    """None for a call that goes its usual way."""
    is_old = size_average is not None or reduce is not None
    if is_old or not isinstance(input, DTensor) or not is_cut_along_classes(input):
        return None
    return loss_of_dtensor(input, target, weight, LossOptions(ignore_index, reduction, label_smoothing))
