"""use_kernels on forwards of which a graph does not tell all, and on models that change after it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from disttrain.kernels import loss_from_head, use_kernels
from tests.cases.kernels import drawn

X = drawn(3, 4).float()


def quietly(model: nn.Module) -> set[str]:
    return {one.what for one in use_kernels(model, report=lambda _: None)}


def gradients(model: nn.Module, *inputs: Any) -> list[torch.Tensor]:
    """And the result."""
    model.zero_grad()
    result = model(*inputs)
    result.sum().backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [result.detach(), *grads]


class Untold(nn.Module):
    """Were it not for what beside it is no operator, its product would become a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.outputs, self.last = nn.Linear(4, 4), [], None
        self.mask = torch.ones(4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.gate(x)) * x


class WithoutGradient(Untold):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            gate = self.gate(x)
        return F.silu(gate) * self.gate(x)


class InAutocast(Untold):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            gate = self.gate(x)
        return F.silu(gate.float()) * x


class Checkpointing(Untold):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(checkpoint(self.gate, x, use_reentrant=False)) * x


class Backwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return -grad


class WithGradientOfItsOwn(Untold):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(Backwards.apply(self.gate(x))) * x  # type: ignore[no-untyped-call]


class Setting(Untold):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.gate(x)) * x
        self.last = y.detach()
        return y


class Appending(Untold):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.gate(x)) * x
        self.outputs.append(y.detach())
        return y


class Catching(Untold):
    """What a trace raises need not come out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            self.last = x
        except Exception:  # noqa: BLE001  (as a user's code may)
            return x
        return F.silu(self.gate(x)) * x


class Asking(Untold):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.gate(x)) * x
        return y * 2 if isinstance(x, torch.Tensor) else y


class Making(Untold):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.gate(x)) * x + torch.arange(4)


class Masking(Untold):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.gate(x)) * x if self.mask.any() else self.gate(x)


class Counting(Untold):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.gate(x)) * x if self.count else self.gate(x)


@pytest.mark.parametrize(
    "kind",
    [
        WithoutGradient,
        InAutocast,
        Checkpointing,
        WithGradientOfItsOwn,
        Setting,
        Appending,
        Catching,
        Asking,
        Making,
        Masking,
        Counting,
    ],
)
def test_what_operators_do_not_tell_is_left_alone(kind: type[Untold]) -> None:
    model = kind()
    before = set(vars(model))
    other = copy.deepcopy(model)
    assert not quietly(other)
    assert type(other) is kind
    assert type(other.gate) is nn.Linear
    assert (set(vars(other)), other.outputs, other.last) == (before, [], None)
    torch.testing.assert_close(gradients(other, X), gradients(model, X))


def test_a_forward_of_the_module_s_own_is_left_alone() -> None:
    model = Untold()
    model.forward = lambda x: x  # type: ignore[method-assign]
    assert not quietly(model)


class Options(NamedTuple):
    factor: float


class Reading(Untold):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.activation, self.options = 2.0, F.silu, Options(3.0)
        self.gate.factor = 1  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = self.scale * self.options.factor * self.gate.factor  # type: ignore[operator]
        return self.activation(self.gate(x)) * x * factor


def set_scale(model: Any) -> None:
    model.scale = 5.0


def set_options(model: Any) -> None:
    model.options = Options(7.0)


def set_within(model: Any) -> None:
    model.gate.factor = 4


def set_function(model: Any) -> None:
    model.activation = F.relu


@pytest.mark.parametrize("change", [set_scale, set_options, set_within, set_function])
def test_attributes_that_change_are_heard_of(change: Callable[[nn.Module], None]) -> None:
    model = Reading()
    other = copy.deepcopy(model)
    assert quietly(other) == {"SwiGLU"}
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradients(other, X), gradients(model, X))
    torch.testing.assert_close(compiled(X), model(X))
    for one in (model, other):
        change(one)
    torch.testing.assert_close(gradients(other, X), gradients(model, X))
    torch.testing.assert_close(compiled(X), model(X))


class Masked(Untold):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        y = F.silu(self.gate(x)) * x
        return y if mask is None else y + mask


def test_an_argument_that_is_none_goes_the_old_way() -> None:
    model = Masked()
    other = copy.deepcopy(model)
    assert quietly(other) == {"SwiGLU"}
    for mask in (None, X):
        torch.testing.assert_close(gradients(other, X, mask), gradients(model, X, mask))
    torch.testing.assert_close(other(X, mask=None), model(X, mask=None))


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.activation, self.head = nn.RMSNorm(4), nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        y = x + self.activation(self.gate(x)) * x
        return F.cross_entropy(self.head(self.norm(y) + y), target)


@pytest.mark.parametrize("name", ["norm", "activation", "head"])
def test_hooks_of_what_kernels_replace_run(name: str) -> None:
    model = Hooked()
    other = copy.deepcopy(model)
    assert quietly(other) == {"RMSNorm", "SwiGLU", "residual + norm", "linear + cross-entropy"}
    target = torch.tensor([0, 1, 2])
    for one in (model, other):
        one.get_submodule(name).register_forward_hook(lambda module, inputs, output: output * 2)
        one.get_submodule(name).register_forward_pre_hook(lambda module, inputs: (inputs[0] * 3,))
    torch.testing.assert_close(gradients(other, X, target), gradients(model, X, target))


def test_another_activation_put_in_its_place_is_used() -> None:
    model = Hooked()
    quietly(model)
    other = Hooked()
    other.load_state_dict(model.state_dict())
    for one in (model, other):
        one.activation = nn.ReLU()  # type: ignore[assignment]
    torch.testing.assert_close(model(X, torch.tensor([0, 1, 2])), other(X, torch.tensor([0, 1, 2])))


def test_a_head_with_a_forward_of_its_own_gets_it_back() -> None:
    head = nn.Linear(4, 5)
    head.forward = own = lambda x: x  # type: ignore[method-assign]
    with loss_from_head(head, torch.tensor([0, 1, 2])):
        assert head(X).dim() == 0
    assert head.forward is own


def test_a_loss_keeps_its_dtype() -> None:
    model = Hooked().bfloat16()
    quietly(model)
    assert model(X.bfloat16(), torch.tensor([0, 1, 2])).dtype is torch.bfloat16
