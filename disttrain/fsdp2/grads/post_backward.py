"""Notices the end of a module's own backward by the gradients of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from disttrain.dtensor import DTensor
from disttrain.fsdp2.modules.pytrees import for_each_tensor


def watch_inputs(
    post_backward: Callable[[], None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass the inputs that require gradients on, so that `post_backward` is called once their gradients have come.

    A plain one that is alone becomes a view with a hook, which costs less than a function of autograd.
    """
    inputs: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            inputs.append(tensor)
        return tensor

    for_each_tensor(args, collect)
    if kwargs:
        for_each_tensor(kwargs, collect)
    if not inputs:
        return args, kwargs
    outputs = iter(_handed_on(post_backward, inputs))

    def replace(tensor: torch.Tensor) -> torch.Tensor:
        return next(outputs) if tensor.requires_grad else tensor

    return for_each_tensor(args, replace), for_each_tensor(kwargs, replace) if kwargs else kwargs


def _handed_on(post_backward: Callable[[], None], inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    if len(inputs) > 1 or type(inputs[0]) is not torch.Tensor:
        return _PostBackward.apply(post_backward, *inputs)  # type: ignore[no-any-return, no-untyped-call]
    view = inputs[0].view_as(inputs[0])
    view.register_hook(lambda _: post_backward())
    return (view,)


def as_plain(grad: torch.Tensor) -> torch.Tensor:
    """The gradient of a plain output. It comes as a DTensor where a loss has a term of the parameters, such as a
    penalty on their norms: a plain loss and a DTensor make a DTensor, whose gradient is that of both."""
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


class _PostBackward(torch.autograd.Function):
    """Hands its inputs on; when their gradients come back, the module's own backward is over."""

    @staticmethod
    def forward(ctx: Any, post_backward: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.post_backward = post_backward
        return inputs

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # What is handed on is the input itself, whose tangent must be a view of the input's.
        return tuple(tangent if tangent is None else tangent.view_as(tangent) for tangent in tangents)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.post_backward()
        return (None, *grads)
