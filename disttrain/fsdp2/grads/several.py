"""Hooks that wait for the gradients of several leaves, as `torch.autograd.graph.register_multi_grad_hook` makes them.

Autograd counts which of the leaves its graph has, and finds none of the shards there. So these hooks are called by us,
when all reductions of a backward have ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from disttrain.fsdp2._torch import SeveralGradients


@dataclass
class SeveralGrads:
    """Gradients that have come, for hooks that are called when all have."""

    _waiting: dict[int, tuple[SeveralGradients, list[torch.Tensor | None]]] = field(default_factory=dict)

    def add(self, hook: SeveralGradients, grad: torch.Tensor) -> None:
        """One of the gradients that `hook` waits for has come."""
        _, grads = self._waiting.setdefault(hook.key, (hook, [None] * hook.num_tensors))
        grads[hook.position] = grad

    def call_hooks(self) -> None:
        """All have come that will: a leaf that the backward did not reach has None."""
        while self._waiting:
            hook, grads = self._waiting.pop(next(iter(self._waiting)))
            hook.function(grads)

    def forget(self) -> None:
        """The backward has failed."""
        self._waiting.clear()
