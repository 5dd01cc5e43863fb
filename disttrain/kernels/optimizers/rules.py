"""Rules of optimizers for one tensor, as numbers: the arguments of both implementations."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

ROW: Final = 7
"""64-bit numbers in a row of a launch's table: of a piece six addresses and its number, and `numbers_of` its rule."""


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
    step: int = 0
    """The number of this step."""


class Piece(NamedTuple):
    """One parameter, or this rank's part of it, with what belongs to it: all of one shape, contiguous."""

    parameter: torch.Tensor
    grad: torch.Tensor
    states: tuple[torch.Tensor, ...]
    """Of adamw the averages of gradients and of their squares, of the others one, of sgd without momentum none. In bf16
    they are rounded at random, so that what is too small for a step is not lost on average."""
    master: torch.Tensor | None
    """The parameter in fp32; the parameter is then its rounded copy."""
    number: int
    """Another one for each part of each parameter; the same on ranks that hold copies of a part."""

    copy: torch.Tensor | None = None
    """A second target of the new value, rounded to its dtype."""

    def seed(self, step: int) -> int:
        """The seed of the random numbers that round to bf16 in this step: copies stay alike, nothing else is."""
        # Of CPUs' generators only the low half counts.
        return step << 32 | (self.number * 0x9E3779B1 + step * 0x85EBCA77) % 2**32

    @property
    def is_rounded_at_random(self) -> bool:
        """True if any part of it is kept in bf16 alone."""
        is_alone = self.master is None and self.parameter.dtype is torch.bfloat16
        return is_alone or any(state.dtype is torch.bfloat16 for state in self.states)

    @property
    def kind(self) -> tuple[torch.dtype | None, ...]:
        """Pieces of one kind can be updated together."""
        return (
            self.parameter.dtype,
            self.grad.dtype,
            self.states[0].dtype if self.states else None,
            None if self.master is None else self.master.dtype,
            None if self.copy is None else self.copy.dtype,
        )


def numbers_of(rule: Rule) -> tuple[int, ...]:
    """The rule's numbers as the kernel reads them: the step, then seven floats of 32 bits, two in a place."""
    floats = rule.lr, rule.weight_decay, rule.beta1, rule.beta2, rule.eps, rule.correction1, rule.correction2, 0.0
    return rule.step, *struct.unpack("4q", struct.pack("8f", *floats)), 0, 0
