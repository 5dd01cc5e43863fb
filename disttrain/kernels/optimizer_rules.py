"""What an optimizer does to one tensor, as numbers: the arguments of both implementations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Rule:
    """`kind` is adamw, lion or sgd; of the numbers each has those that its formula names.

    Sources: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101); Chen et al., "Symbolic
    Discovery of Optimization Algorithms" (2302.06675); torch.optim.SGD for sgd.
    """

    kind: str
    lr: float
    weight_decay: float
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    correction1: float = 1.0
    """1 - beta1 ** step, of adamw."""
    correction2: float = 1.0
    """sqrt(1 - beta2 ** step), of adamw."""
    is_nesterov: bool = False
    """Of sgd, whose momentum is beta1."""
    seed: int = 0
    """Of the random numbers that round to bf16; the same on all ranks, and another one in each step."""


class Piece(NamedTuple):
    """One parameter, or this rank's part of it, with what belongs to it: all of one shape, contiguous."""

    parameter: torch.Tensor
    grad: torch.Tensor
    states: tuple[torch.Tensor, ...]
    """Of adamw the averages of gradients and of their squares, of the others one, of sgd without momentum none. In bf16
    they are rounded at random, so that what is too small for a step is not lost on average."""
    master: torch.Tensor | None
    """The parameter in fp32; the parameter is then its rounded copy."""

    @property
    def kind(self) -> tuple[torch.dtype | None, ...]:
        """Pieces of one kind can be updated together."""
        state = self.states[0].dtype if self.states else None
        return self.parameter.dtype, self.grad.dtype, state, None if self.master is None else self.master.dtype
