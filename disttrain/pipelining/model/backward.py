"""A stage's backward in two parts: gradients of its inputs (I), for which others wait, and of its weights (W).

    split_layers(stage)                                       # once
    backward = Backward()                                     # for each microbatch
    with backward.forward():
        outputs = stage(*inputs)
    grads = backward.backward_input(outputs, output_grads, inputs)
    backward.backward_weight()

Linear, embedding and norm layers postpone their weights' gradients to W (`split_layers`). Gradients of other parameters
are computed in I, and kept. In both cases a parameter receives its gradient in W, once: summed over all its uses, in
the order of an undivided backward, and its hooks are called. Source of the idea: Zero Bubble (arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

from disttrain.errors import ShapeError
from disttrain.pipelining._torch import Root, edge_of, gradients_of, has_hooks, run_backward, without_hooks
from disttrain.weight_grads import Grads, kept_by

Casts = dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]]
"""A parameter, so that it lives, and its copy, by its identity and the copy's dtype."""

_LEAF = "torch::autograd::AccumulateGrad"


class Backward:
    """The backward of one forward: either `backward`, or `backward_input` and later `backward_weight`.

    Args: casts       copies of parameters in autocast's dtype: give the same to all forwards between two changes of the
                      parameters, and there is one of each;
          fuses_sums  products of layers that `split_layers` has changed add to the gradients that are there, in one
          kernel: rounded once instead of twice, so not bit for bit what autograd makes. Not where hooks wait for them.
    """

    def __init__(self, casts: Casts | None = None, *, fuses_sums: bool = False) -> None:
        self._casts = {} if casts is None else casts
        self._fuses_sums = fuses_sums
        self._is_split = False
        self._inputs: Sequence[Any] = ()
        self._kept: list[tuple[Grads, Callable[[], Grads]]] = []

    def forward(self) -> AbstractContextManager[None]:
        """Compute the forward within it. A backward by any other way computes everything at once."""
        return kept_by(self)

    def keep(self, parameters: Grads, compute: Callable[[], Grads]) -> bool:
        """A layer leaves its weights' gradients here, while `backward_input` runs."""
        if not self._is_split or any(
            tensor is parameter for tensor in self._inputs for parameter in parameters if parameter is not None
        ):
            return False
        self._kept.append((parameters, compute))
        return True

    def cast(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A parameter's values in another dtype."""
        key = id(parameter), dtype
        if key not in self._casts:
            self._casts[key] = parameter, parameter.to(dtype)
        return self._casts[key][1]

    def sum_for(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """The gradient that a product may add to; None if there is none yet, or if a hook wants each term."""
        total = parameter.grad if self._fuses_sums and parameter.is_leaf else None
        may_add = type(total) is torch.Tensor and total.dtype == dtype and not has_hooks(parameter)
        return total if may_add else None

    def backward(
        self, outputs: Sequence[Any], grads: Sequence[torch.Tensor | None] | None, inputs: Sequence[Any]
    ) -> tuple[torch.Tensor | None, ...]:
        """Everything at once, parameters included. Arguments and result as of `backward_input`."""
        roots, root_grads = _roots(outputs, grads)
        wanted = [tensor for tensor in inputs if _wants_grad(tensor)]
        if roots:
            run_backward(roots, root_grads)
        grads_of = {id(tensor): tensor.grad for tensor in wanted}
        for tensor in wanted:
            tensor.grad = None
        return tuple(grads_of.get(id(tensor)) for tensor in inputs)

    def backward_input(
        self, outputs: Sequence[Any], grads: Sequence[torch.Tensor | None] | None, inputs: Sequence[Any]
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the inputs; nothing else receives one before `backward_weight`.

        Args:    outputs  of the forward, or the edges of the graph that they come from (`edge_of`); what is neither,
                          or has no gradient, is passed over, and so is what gets none;
                 grads    one for each output;  None: the outputs are losses;
                 inputs   as the forward was given them; tensors that want a gradient come from nothing themselves.
        Returns: one for each input, None where there is none. `outputs` hold no activations any more.
        """
        roots, root_grads = _roots(outputs, grads)
        wanted = [tensor for tensor in inputs if _wants_grad(tensor)]
        leaves = _leaves(roots, wanted)
        if not wanted and not leaves:
            return (None,) * len(inputs)
        self._is_split, self._inputs = True, wanted
        try:
            # The hooks of leaves are called with the whole gradient, in W.
            with without_hooks(leaves):
                all_grads = gradients_of([*wanted, *leaves], roots, root_grads)
        finally:
            self._is_split, self._inputs = False, ()
        self._keep_found(leaves, all_grads[len(wanted) :])
        of_inputs = {id(tensor): grad for tensor, grad in zip(wanted, all_grads, strict=False)}
        return tuple(of_inputs.get(id(tensor)) for tensor in inputs)

    def _keep_found(self, leaves: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> None:
        """Keeps the gradients of weights that had to be computed with those of the inputs until W."""
        pairs = [(leaf, grad) for leaf, grad in zip(leaves, grads, strict=True) if grad is not None]
        if pairs:
            rest = [grad for _, grad in pairs]
            self._kept.insert(0, ([leaf for leaf, _ in pairs], lambda: [rest.pop(0) for _ in pairs]))

    def backward_weight(self) -> None:
        """Compute the weights' gradients that were kept; all parameters receive theirs, and their hooks are called."""
        waiting, self._kept = self._kept, []
        roots = []
        with torch.enable_grad():
            # The engine begins with the node that was made last.
            while waiting:
                parameters, compute = waiting.pop()
                roots.append(_Later.apply(compute, *parameters))  # type: ignore[no-untyped-call]
        if roots:
            run_backward(roots, roots)


class _Later(torch.autograd.Function):
    """An empty output whose backward returns the gradients of some parameters. Autograd adds them up, and calls their
    hooks."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[[], Grads], *parameters: torch.Tensor | None) -> torch.Tensor:
        ctx.compute = compute
        some = next(parameter for parameter in parameters if parameter is not None)
        return torch.empty(0, device=some.device)

    @staticmethod
    def backward(ctx: Any, _grad: torch.Tensor) -> Any:
        # Its tensors are released now, not only after all others have been computed.
        compute, ctx.compute = ctx.compute, None
        return (None, *compute())


def _roots(
    outputs: Sequence[Any], grads: Sequence[torch.Tensor | None] | None
) -> tuple[list[Root], list[torch.Tensor]]:
    """The outputs that a backward begins at, and their gradients."""
    roots, root_grads = [], []
    for output, grad in zip(outputs, [None] * len(outputs) if grads is None else grads, strict=True):
        if not _wants_grad(output) or (grad is None and grads is not None):
            continue
        if isinstance(output, torch.Tensor) and grad is not None and grad.shape != output.shape:
            raise ShapeError(
                "Backward",
                f"the gradient of shape {list(grad.shape)} is given for an output of shape {list(output.shape)}.",
                "Give one of the same shape.",
            )
        roots.append(output)
        root_grads.append(torch.ones_like(output) if grad is None else grad)
    return roots, root_grads


def _wants_grad(value: Any) -> bool:
    return isinstance(value, GradientEdge) or (isinstance(value, torch.Tensor) and value.requires_grad)


def _leaves(roots: Sequence[Root], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """All leaves that get a gradient from the roots, without the inputs."""
    input_ids = set(map(id, inputs))
    edges = [root if isinstance(root, GradientEdge) else edge_of(root) for root in roots]
    # While `seen` holds them, torch gives the same Python objects for the same nodes.
    waiting: list[Any] = list(dict.fromkeys(edge.node for edge in edges if edge is not None))
    seen: set[Node | None] = {None, *waiting}
    leaves = []
    while waiting:
        node = waiting.pop()
        further = node.next_functions
        for child, _ in further:
            if child not in seen:
                seen.add(child)
                waiting.append(child)
        if not further and node.name() == _LEAF and id(node.variable) not in input_ids:
            leaves.append(node.variable)
    return leaves
