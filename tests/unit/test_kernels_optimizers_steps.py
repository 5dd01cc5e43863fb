"""What an optimizer takes over of its parameters from one step to the next, and what it must see anew."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from disttrain.kernels import SGD, AdamW
from tests.cases.optimizers import give_gradients, parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_changes_between_steps_is_seen(dtype: torch.dtype) -> None:
    """Steps that take the last one's pieces over, beside those of an optimizer that takes all apart anew."""
    own, other = parameters(dtype), parameters(dtype)
    optimizers = SGD(own, lr=0.1, momentum=0.9), SGD(other, lr=0.1, momentum=0.9)

    def for_both(change: Any) -> None:
        for optimizer, params in zip(optimizers, (own, other), strict=True):
            change(optimizer, params)

    def with_other_state(optimizer: Any, params: list[nn.Parameter]) -> None:
        optimizer.state[params[4]] = {name: value * 2 for name, value in optimizer.state[params[4]].items()}

    def written_without_gradient(optimizer: Any, params: list[nn.Parameter]) -> None:
        params[0].grad = None
        with torch.no_grad():
            params[0].fill_(3.0)

    changes: list[Any] = [
        lambda *_: None,
        lambda *_: None,
        lambda _, params: setattr(params[1], "grad", None),
        lambda *_: None,
        written_without_gradient,
        lambda _, params: setattr(params[4], "data", params[4].data.flip(0)),
        lambda optimizer, _: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
        lambda optimizer, params: optimizer.state[params[0]].update(momentum_buffer=torch.ones(3, 5)),
        with_other_state,
        lambda optimizer, _: optimizer.param_groups[0].update(momentum=0.0),
        lambda optimizer, _: optimizer.param_groups[0].update(momentum=0.5, lr=0.2),
        lambda optimizer, params: optimizer.param_groups[0].update(params=params[::-1]),
        lambda optimizer, params: optimizer.state.pop(params[1]),
        lambda *_: None,
    ]
    for step, change in enumerate(changes):
        give_gradients(own, step)
        give_gradients(other, step)
        for_both(change)
        optimizers[1]._last_pieces.clear()
        for_both(lambda optimizer, _: optimizer.step())
        assert all(map(torch.equal, own, other)), f"change {step}"
    assert all(bool((parameter != 3.0).any()) for parameter in own if parameter.numel())


def test_gradients_are_let_go_of_after_a_step() -> None:
    own = parameters()
    optimizer = AdamW(own, lr=0.1)
    for step in range(3):
        give_gradients(own, step)
        optimizer.step()
    gone = [weakref.ref(parameter.grad) for parameter in own]
    optimizer.zero_grad()
    assert [each() for each in gone] == [None] * len(own)


def test_what_is_written_to_a_parameter_without_gradient_stays() -> None:
    own = parameters(torch.bfloat16)
    optimizer = AdamW(own, lr=1e-3)
    give_gradients(own, 0)
    optimizer.step()
    for without in (True, False):
        give_gradients(own, 1)
        if without:
            own[0].grad = None
            with torch.no_grad():
                own[0].fill_(3.0)
        optimizer.step()
        torch.testing.assert_close(own[0].detach(), torch.full_like(own[0], 3.0), rtol=0.0, atol=0.02)
