"""An optimizer's step by torch's operators, for CPUs and fp64; it judges the kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from disttrain.kernels.choice import wide_dtype
from disttrain.kernels.optimizers.rules import Piece, Rule


def update(pieces: Sequence[Piece], rule: Rule, scale: torch.Tensor | None) -> None:
    """Write the parameters and states of pieces of one kind. `scale` () multiplies the gradients."""
    for piece in pieces:
        random = torch.Generator(piece.parameter.device).manual_seed(piece.seed(rule.step))
        main = piece.parameter if piece.master is None else piece.master
        wide = wide_dtype(main.dtype)
        grad = piece.grad.to(wide)
        if scale is not None:
            grad = grad * scale
        states = [state.to(wide) for state in piece.states]
        value, states = _updated(main.to(wide), grad, states, rule)
        for state, target in zip(states, piece.states, strict=True):
            _write(target, state, random)
        if piece.master is None:
            _write(piece.parameter, value, random)
        else:
            piece.master.copy_(value)
            piece.parameter.copy_(value)
        if piece.copy is not None:
            piece.copy.copy_(piece.parameter)


def _updated(
    value: torch.Tensor, grad: torch.Tensor, states: list[torch.Tensor], rule: Rule
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    if rule.kind == "sgd":
        grad = grad + value * rule.weight_decay
        if not states:
            return value - rule.lr * grad, []
        momentum = states[0] * rule.beta1 + grad
        return value - rule.lr * (grad + momentum * rule.beta1 if rule.is_nesterov else momentum), [momentum]
    value = value * (1 - rule.lr * rule.weight_decay)
    if rule.kind == "lion":
        direction = (states[0] * rule.beta1 + grad * (1 - rule.beta1)).sign()
        return value - rule.lr * direction, [states[0] * rule.beta2 + grad * (1 - rule.beta2)]
    average = states[0] * rule.beta1 + grad * (1 - rule.beta1)
    squares = states[1] * rule.beta2 + grad.square() * (1 - rule.beta2)
    step = average / rule.correction1 / (squares.sqrt() / rule.correction2 + rule.eps)
    return value - rule.lr * step, [average, squares]


def _write(target: torch.Tensor, value: torch.Tensor, random: torch.Generator) -> None:
    """Rounded at random where that is bf16: up as likely as the value is near to it."""
    if target.dtype is not torch.bfloat16:
        target.copy_(value)
        return
    bits = value.float().view(torch.int32)
    noise = torch.randint(0, 1 << 16, value.shape, generator=random, device=value.device, dtype=torch.int32)
    rounded = ((bits + noise) & -65536).view(torch.float32)
    target.copy_(torch.where(value.isfinite(), rounded, value.float()))
