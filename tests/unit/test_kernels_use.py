"""use_kernels on models that were not written for it: what it replaces, what it leaves, and the same numbers."""

from __future__ import annotations

import copy
import io
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from llama.config import PRESETS
from llama.model import Llama
from torch import nn

from disttrain.kernels import use, use_kernels
from tests.cases.kernels import drawn


def quietly(model: nn.Module) -> Counter[str]:
    return Counter(one.what for one in use_kernels(model, report=lambda _: None))


def assert_same(model: nn.Module, other: nn.Module, *inputs: torch.Tensor) -> None:
    """Values, and gradients of all parameters."""
    results = [each(*inputs) for each in (model, other)]
    torch.testing.assert_close(*results)
    for result in results:
        (result * drawn(*result.shape, dtype=result.dtype)).sum().backward()
    for (name, one), (other_name, two) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert name == other_name
        torch.testing.assert_close(one.grad, two.grad)


def test_the_example_s_llama(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = Llama(PRESETS["tiny"]).double()
    model.init()
    other = copy.deepcopy(model)
    found = use_kernels(other)
    assert (
        capsys.readouterr().out
        == "use_kernels: Llama: 5 x RMSNorm, 2 x SwiGLU, 2 x attention, 2 x residual + norm, 4 x rotation\n"
    )
    assert {one.name for one in found if one.what == "SwiGLU"} == {"blocks.0.feed_forward", "blocks.1.feed_forward"}
    tokens = torch.randint(0, 256, (2, 16))
    assert_same(model, other, tokens)
    assert model.state_dict().keys() == other.state_dict().keys()
    assert type(other.blocks[0]) is type(other.blocks[1])
    assert isinstance(other.blocks[0], type(model.blocks[0]))
    assert not use_kernels(other, report=lambda _: None)


class Gated(nn.Module):
    def __init__(self, activation: nn.Module | None) -> None:
        super().__init__()
        self.both, self.down, self.activation = nn.Linear(6, 16), nn.Linear(8, 6), activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(x).chunk(2, -1)
        if self.activation is None:
            return self.down(up * F.gelu(gate, approximate="tanh"))
        return self.down(self.activation(gate) * up)


@pytest.mark.parametrize("activation", [None, nn.SiLU(), nn.GELU()], ids=str)
def test_gated_layers(activation: nn.Module | None) -> None:
    model = Gated(activation).double()
    other = copy.deepcopy(model)
    assert quietly(other) == {"SwiGLU" if isinstance(activation, nn.SiLU) else "GeGLU": 1}
    assert_same(model, other, drawn(3, 6))


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 9)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(x + x.sin()))
        return F.cross_entropy(logits.float().view(-1, 9), target.view(-1), ignore_index=3, label_smoothing=0.1)


def test_a_loss_within_the_model() -> None:
    model = WithLoss()
    other = copy.deepcopy(model)
    assert quietly(other) == {"LayerNorm": 1, "linear + cross-entropy": 1, "residual + norm": 1}
    assert_same(model, other, drawn(2, 4, 6).float(), torch.arange(8).view(2, 4))


class LossOverClasses(WithLoss):
    """Of logits (batch, classes, places), as F.cross_entropy has them."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x), target)


def test_a_loss_whose_classes_come_second() -> None:
    model = LossOverClasses()
    other = copy.deepcopy(model)
    assert quietly(other) == {"LayerNorm": 1, "linear + cross-entropy": 1}
    torch.manual_seed(0)
    for x in (drawn(2, 9, 6).float(), drawn(4, 6).float()):
        target = torch.randint(0, 9, (2, 9) if x.dim() == 3 else (4,))
        torch.testing.assert_close(other(x, target), model(x, target))


class Folded(WithLoss):
    """Rows that are not the head's."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x).view(-1, 18), target)


def test_rows_of_another_width_are_left_alone() -> None:
    assert quietly(Folded()) == {"LayerNorm": 1}


class Turning(nn.Module):
    """Rotates as the example's Llama does, but rounds to nothing, and what it is given need not fit a kernel."""

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (5, 8), (2, 1, 5, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotations(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    model = Turning()
    other = copy.deepcopy(model)
    assert quietly(other) == {"rotation": 1}
    x, cos, sin = drawn(*shape, dtype=dtype), drawn(5, 4, seed=1).float(), drawn(5, 4, seed=2).float()
    found = other(x, cos, sin)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, model(x, cos, sin))
    torch.testing.assert_close(other(x, cos[0], sin[0]), model(x, cos[0], sin[0]))


class Moody(nn.Module):
    """Differs in training; its trace would tell but one half."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x) * x if self.training else x


class Optional(nn.Module):
    """To a stand-in, what is None by default would be there."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        y = F.silu(x) * x
        return y if scale is None else y * scale


class Choosing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x) * x if x.sum() > 0 else x


class Doubled(nn.Module):
    """The activation is needed apart from the product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(x)
        return y * x + y


@pytest.mark.parametrize("kind", [Moody, Optional, Choosing, Doubled])
def test_what_a_trace_cannot_tell_is_left_alone(kind: type[nn.Module]) -> None:
    model = kind()
    assert not quietly(model)
    assert type(model) is kind


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_other_shapes_and_dtypes_go_the_old_way() -> None:
    model = Broadcast().double()
    other = copy.deepcopy(model)
    assert quietly(other) == {"SwiGLU": 1, "RMSNorm": 1, "residual + norm": 1}
    assert_same(model, other, drawn(3, 6))
    x = drawn(3, 6).float()
    torch.testing.assert_close(other(x), model(x))


class Broadcast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + x[:1]) * (F.silu(x) * x[:1])


def test_a_graph_holds_the_model_unbroken() -> None:
    model = Gated(nn.SiLU()).double()
    quietly(model)
    x = drawn(3, 6)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))


def test_pickles_and_copies_have_the_kernels() -> None:
    model = Llama(PRESETS["tiny"])
    quietly(model)
    file = io.BytesIO()
    torch.save(model, file)
    # As in a process that has made no class yet.
    use._CLASSES.clear()
    read = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    kinds = {type(block) for block in read.blocks}
    assert len(kinds) == 1
    assert all(hasattr(kind.forward, "_has_kernels") for kind in kinds)
    assert type(copy.deepcopy(model)) is type(model)
    tokens = torch.randint(0, 64, (2, 8))
    assert torch.equal(model(tokens), read(tokens))
