"""Brings gradients to the layout of their parameters.

The gradient of a replicated parameter arrives as each rank's term of a sum. Every operator that reads it would reduce
it again, and clipping and optimizers call several. Small ones, such as those of norms, are reduced together when the
backward ends. Until then they keep the layout in which they arrived, and the hooks of their parameters wait.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Self

import torch
from torch import nn

from disttrain.dtensor._torch import backward_number, when_backward_ends
from disttrain.dtensor.rank_comparison import before_redistribution
from disttrain.dtensor.redistribute.many import Moves, goes_together
from disttrain.dtensor.spec.checked_layouts import gradient_placements
from disttrain.dtensor.spec.layout import Layout, Spec


@torch.no_grad()
def settle_together(parameters: Iterable[Any]) -> None:
    """Brings the gradients of parameters to the layouts of these, also those that wait for the end of a backward.
    Collective."""
    grads = [(parameter, parameter.grad, _wanted(parameter, parameter.grad)) for parameter in parameters]
    moved = [(parameter, grad, layout) for parameter, grad, layout in grads if layout is not None]
    for _, grad, layout in moved:
        before_redistribution(grad, layout)
    parts = [grad._local_tensor for _, grad, _ in moved]
    Moves([(index, grad._spec, layout) for index, (_, grad, layout) in enumerate(moved)]).run(parts)
    for (parameter, grad, layout), part in zip(moved, parts, strict=True):
        parameter.grad = type(grad)(part, grad._spec.with_layout(layout))


class AsParameter:
    """The part of DTensor that parameters need."""

    is_leaf: bool
    requires_grad: bool

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """As of a tensor; gradients that a parameter accumulates from now on lie as it does itself."""
        super().requires_grad_(requires_grad)  # type: ignore[misc]
        if requires_grad and self.is_leaf and not vars(self).get("_settles"):
            super().register_post_accumulate_grad_hook(settle_gradient)  # type: ignore[misc]
            vars(self)["_settles"] = True
        return self

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> Any:
        """As of a tensor; `hook` is called once the gradient lies as the parameter does."""
        return super().register_post_accumulate_grad_hook(partial(_call_settled, hook))  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """As torch copies parameters: without their gradients and hooks."""
        if not isinstance(self, nn.Parameter):
            return super().__deepcopy__(memo)  # type: ignore[misc]
        if id(self) not in memo:
            copied = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
            attributes = vars(copied)
            others = {
                name: value for name, value in vars(self).items() if name not in attributes and name != "_settles"
            }
            attributes.update(copy.deepcopy(others, memo))
        return memo[id(self)]


def settle_gradient(leaf: Any) -> None:
    """Brings the gradient that a parameter has accumulated to the parameter's layout. Collective if anything moves.

    Other leaves keep the layouts in which gradients arrive, as torch's DTensor does for all.
    """
    grad: Any = leaf.grad
    # First: to ask for nn.Parameter takes torch longer.
    if getattr(grad, "_spec", None) is not leaf._spec and isinstance(leaf, nn.Parameter):
        layout = _wanted(leaf, grad)
        if layout is not None and not _waits(leaf, grad, layout):
            with torch.no_grad():
                leaf.grad = grad.redistribute(placements=layout.placements)


def _wanted(parameter: Any, grad: Any) -> Layout | None:
    """The layout that a gradient should get; None where it has it."""
    spec_of_parameter: Spec = parameter._spec
    spec: Spec | None = getattr(grad, "_spec", None)
    if spec is None or spec is spec_of_parameter:
        return None
    wanted = spec_of_parameter.layout.with_placements(gradient_placements(parameter.placements))
    return None if spec.layout is wanted else wanted


def _waits(parameter: Any, grad: Any, layout: Layout) -> bool:
    """Postpones a gradient to the end of the backward. All ranks must decide alike, so hooks, which only some ranks may
    have, don't matter."""
    number = backward_number()
    if number < 0 or torch.compiler.is_compiling() or grad.requires_grad:
        return False
    spec: Spec = grad._spec
    if spec.view_copy is not None or not goes_together(spec, layout):
        return False
    running = spec.mesh.world.companion(_Running, _Running).backwards
    backward = running.get(number)
    if backward is None:
        backward = running[number] = _Backward()
        when_backward_ends(backward.end)
    backward.waiting[id(parameter)] = parameter
    return True


def _call_settled(hook: Callable[[Any], None], leaf: Any) -> None:
    """Call a hook of `leaf`, at the end of the backward where its gradient waits for that."""
    backward = leaf._spec.mesh.world.companion(_Running, _Running).backwards.get(backward_number())
    if backward is not None and id(leaf) in backward.waiting:
        backward.hooks.append(partial(hook, leaf))
    else:
        hook(leaf)


class _Backward:
    """Parameters whose gradients wait for the end of one backward, and the hooks that wait with them."""

    def __init__(self) -> None:
        self.waiting: dict[int, Any] = {}
        """By their ids."""
        self.hooks: list[Callable[[], None]] = []

    @torch.no_grad()  # as hooks are called within a backward
    def end(self) -> None:
        """Reduce what waits. Collective."""
        waiting, self.waiting = self.waiting, {}
        settle_together(waiting.values())
        for hook in self.hooks:
            hook()


class _Running:
    """The backwards of a world that have such parameters, by number, for as long as the engine has them."""

    def __init__(self) -> None:
        self.backwards: weakref.WeakValueDictionary[int, _Backward] = weakref.WeakValueDictionary()

    def close(self) -> None:
        """Nothing to let go of."""
