"""Lets gradients of weights wait: only the optimizer needs them, while the stage before waits for those of inputs.

An autograd Function that multiplies by a weight asks for `current_keeper()` in its forward, and in its backward hands
the gradients of its weights to `now_or_later`. A pipeline keeps them until it would be idle (Zero Bubble, arXiv
2401.10241). Without a pipeline they are computed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

Grads = Sequence["torch.Tensor | None"]


class WeightGradKeeper(Protocol):
    """Whoever runs a backward pass in two parts."""

    def sum_for(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """The sum of a parameter's earlier gradients, for a layer that adds its own to it; None: it hands that over."""

    def cast(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A parameter's values in another dtype: one copy for all who ask before they change."""

    def keep(self, parameters: Grads, compute: Callable[[], Grads]) -> bool:
        """Keep `compute`, which returns one gradient per parameter, for later. False: compute them at once.

        The thread is that of the backward pass. None stands for a parameter of which no gradient is wanted.
        """


_current: ContextVar[WeightGradKeeper | None] = ContextVar("weight_grad_keeper", default=None)


def current_keeper() -> WeightGradKeeper | None:
    """The keeper that runs this forward; to be asked there, since the backward may run in another thread."""
    return _current.get()


@contextmanager
def kept_by(keeper: WeightGradKeeper) -> Iterator[None]:
    """Lets what is computed within leave its weights' gradients to `keeper`."""
    token = _current.set(keeper)
    try:
        yield
    finally:
        _current.reset(token)


def sum_of(keeper: WeightGradKeeper | None, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """The sum that a layer may add this parameter's gradient, of this dtype, to: then nobody else gets it. None:
    nothing."""
    return None if keeper is None else keeper.sum_for(parameter, dtype)


def now_or_later(keeper: WeightGradKeeper | None, parameters: Grads, compute: Callable[[], Grads]) -> Grads:
    """The gradients that a backward returns for these parameters: Nones where `keeper` has taken them.

    `parameters` are those that the forward was given, not copies out of `ctx.saved_tensors`, which activation
    checkpointing makes anew. What was itself computed from something is never kept: its gradient goes on from here.
    """
    wanted = [parameter for parameter in parameters if parameter is not None]
    nobody_asks = not wanted
    if keeper is not None and wanted and all(parameter.is_leaf for parameter in wanted):
        nobody_asks = keeper.keep(parameters, compute)
    return [None] * len(parameters) if nobody_asks else compute()
