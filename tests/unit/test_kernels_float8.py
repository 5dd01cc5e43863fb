"""float8: casts and their scales, linear layers against fp64, and the models that use them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from hypothesis import given
from hypothesis import strategies as st
from llama.config import PRESETS
from llama.model import Llama
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from disttrain.errors import BackendError, LayoutError, ShapeError
from disttrain.kernels import Float8Linear, Float8Weight, float8_linear, use_float8, use_kernels
from disttrain.kernels.float8 import operator as float8
from disttrain.kernels.float8 import reference as float8_reference
from disttrain.kernels.float8.operator import cast, multiply
from disttrain.kernels.float8.shards import cast_shards
from disttrain.kernels.float8.shards_reference import Shard
from disttrain.weight_grads import Grads, kept_by
from tests.cases.kernels import IMPLEMENTATIONS, drawn, use_implementation, values_and_grads

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPES = ["tensorwise", "rowwise"]


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter rounds to float8 in a way of its own; GPUs don't (tests/gpu)."""
    monkeypatch.setenv("DISTTRAIN_KERNELS", "reference")


def whole_numbers(*shape: int, seed: int = 0, largest: int = 4) -> torch.Tensor:
    """Both formats hold them exactly, by whatever scale."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-largest, largest + 1, shape, generator=generator).float()


@given(st.floats(2.0**-100, 2.0**100, width=32), st.sampled_from([E4, E5]))
def test_a_scale_is_the_smallest_power_of_two_that_fits(amax: float, dtype: torch.dtype) -> None:
    scale = float8_reference.scale_of(torch.tensor([amax]), dtype).item()
    largest = torch.finfo(dtype).max
    assert scale.hex().startswith("0x1.0000000000000p")
    assert scale / 2 * largest < amax <= scale * largest


def test_scales_of_nothing_and_of_what_is_not_finite() -> None:
    scales = float8_reference.scale_of(torch.tensor([0.0, float("inf"), float("nan")]), E4)
    assert scales[0] == 2.0**-126
    assert scales[1].isinf()
    assert scales[2].isnan()
    assert cast(torch.zeros(3, 16), E4, by_rows=False).rows.float().eq(0).all()


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("dtype", [E4, E5], ids=str)
def test_a_cast_rounds_once(dtype: torch.dtype, by_rows: bool) -> None:
    x = drawn(37, 48, dtype=torch.float32) * torch.linspace(-9, 9, 48).exp2()
    found = cast(x, dtype, by_rows=by_rows)
    spacing = {E4: 2.0**-4, E5: 2.0**-3}[dtype]
    for codes, scales, wished in (
        (found.rows, found.row_scales, x),
        (found.columns[:, :37], found.column_scales, x.t()),
    ):
        values = codes.double() * scales.double()[:, None]
        smallest = scales.double()[:, None] * torch.finfo(dtype).smallest_normal
        assert ((values - wished).abs() <= spacing * wished.abs().clamp(min=smallest)).all()
    assert found.columns.shape == (48, 48)
    assert not found.columns[:, 37:].float().any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("shape", [(1, 16), (37, 80), (200, 130)], ids=str)
def test_casts_of_exact_values(
    shape: tuple[int, int], by_rows: bool, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_implementation(implementation, monkeypatch)
    x = whole_numbers(*shape) * torch.arange(shape[1]).remainder(4).exp2()
    for wants_rows, wants_columns in ((True, True), (True, False), (False, True)):
        found = cast(x.bfloat16(), E4, by_rows=by_rows, wants_rows=wants_rows, wants_columns=wants_columns)
        wished = float8_reference.cast(x, None, 1, E4, by_rows, wants_rows, wants_columns)
        for one, other in zip(found, wished, strict=True):
            assert one.shape == other.shape
            assert torch.equal(one.float(), other.float())
    # What is float8 already comes to other scales, or to one.
    codes, scales = cast(x, E4, by_rows=True, wants_columns=False)[:2]
    again = cast(codes, E4, by_rows=by_rows, in_scales=scales)
    assert torch.equal(again.rows.float() * again.row_scales[:, None], x)
    assert torch.equal((again.columns.float() * again.column_scales[:, None])[:, : shape[0]], x.t())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("by_rows", [False, True])
def test_shards_are_cast_at_once_as_one_by_one(
    by_rows: bool, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With padding, without rows, and of other sizes each."""
    use_implementation(implementation, monkeypatch)
    sizes = [(37, 80, 40), (0, 16, 3), (200, 48, 200), (3, 1040, 7)]
    shards, sent, end = [], torch.full((40000,), 77, dtype=torch.uint8), 0
    for seed, (num_rows, num_columns, num_padded) in enumerate(sizes):
        values = whole_numbers(num_rows, num_columns, seed=seed) * (2.0**seed)
        num_scales = num_padded if by_rows else 1
        shards.append(Shard(values.bfloat16(), num_padded, end, end + num_padded * num_columns))
        end += num_padded * num_columns + (4 * num_scales + 15) // 16 * 16
    cast_shards(shards, sent, E4, by_rows=by_rows)
    for values, num_padded, codes_start, scales_start in shards:
        wished = float8_reference.cast(values, None, 1, E4, by_rows, True, False)
        codes = sent[codes_start:scales_start].view(E4).view(num_padded, -1).float()
        assert torch.equal(codes[: len(values)], wished[0].float())
        assert not codes[len(values) :].any()
        scales = sent[scales_start:].view(torch.float32)[: num_padded if by_rows else 1]
        assert torch.equal(scales[: len(wished[1])], wished[1])
        assert scales[len(wished[1]) :].eq(1.0).all()


def test_products_of_exact_values() -> None:
    a, b = whole_numbers(5, 32), whole_numbers(7, 32, seed=1)
    for by_rows in (False, True):
        first, second = cast(a, E4, by_rows=by_rows), cast(b, E4, by_rows=by_rows)
        found = multiply(first.rows, first.row_scales, second.rows, second.row_scales, torch.float32)
        assert torch.equal(found, a @ b.t())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(32,), (5, 32), (2, 3, 32), (0, 32)], ids=str)
def test_a_linear_layer_of_exact_values_is_exact(shape: tuple[int, ...], recipe: str) -> None:
    x, weight, bias = whole_numbers(*shape), whole_numbers(48, 32, seed=1), whole_numbers(48, seed=2)

    def grads(run: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
        result = run(*leaves)
        result.backward(whole_numbers(*result.shape, seed=3))
        return [result.detach(), *(leaf.grad for leaf in leaves)]

    for one, other in zip(grads(lambda *inputs: float8_linear(*inputs, recipe=recipe)), grads(F.linear), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_linear_layer_against_fp64(recipe: str, dtype: torch.dtype) -> None:
    inputs = [tensor.to(dtype) for tensor in (drawn(40, 64), drawn(48, 64, seed=1), drawn(48, seed=2))]
    found = values_and_grads(lambda *inputs: float8_linear(*inputs, recipe=recipe), inputs)
    wished = values_and_grads(F.linear, [tensor.double() for tensor in inputs])
    # Two factors with errors of at most 2**-4 (e4m3) or 2**-3 (e5m2) each, which differ from term to term.
    for one, other in zip(found, wished, strict=True):
        assert one.dtype == dtype
        assert (one.double() - other).norm() <= 0.1 * other.norm()


def test_rows_of_very_different_size_keep_their_precision_by_rows() -> None:
    x = drawn(16, 32, dtype=torch.float32) * torch.linspace(0, -30, 16).exp2()[:, None]
    weight = drawn(16, 32, seed=1, dtype=torch.float32)
    wished = F.linear(x, weight)
    error = (float8_linear(x, weight, recipe="rowwise") - wished).norm(dim=1) / wished.norm(dim=1)
    assert error.max() < 0.2
    assert (float8_linear(x, weight) - wished).norm(dim=1)[-1] > 0.9 * wished.norm(dim=1)[-1]


def test_only_float8_is_kept_for_backward() -> None:
    x, weight = drawn(32, 64).bfloat16().requires_grad_(), drawn(48, 64).bfloat16().requires_grad_()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        float8_linear(x, weight)
    assert sum(tensor.nbytes for tensor in kept) == x.numel() + weight.numel() + 8


def test_gradients_that_nobody_asks_for() -> None:
    x, weight = drawn(32, 64).float(), drawn(48, 64).float()
    weight.requires_grad_()
    (grad,) = torch.autograd.grad(float8_linear(x, weight).sum(), [weight])
    assert grad.shape == weight.shape
    frozen = weight.detach()
    (grad,) = torch.autograd.grad(float8_linear(x.requires_grad_(), frozen).sum(), [x])
    assert grad.shape == x.shape
    with torch.no_grad(), patch.object(float8_reference, "cast", wraps=float8_reference.cast) as casts:
        assert not float8_linear(x, weight).requires_grad
    assert not any(call.args[-1] for call in casts.call_args_list)  # no transpose


class Keeper:
    """Keeps all."""

    def __init__(self) -> None:
        self.kept: list[tuple[Grads, Callable[[], Grads]]] = []

    def sum_for(self, parameter: torch.Tensor, dtype: torch.dtype) -> None:
        return None

    def keep(self, parameters: Grads, compute: Callable[[], Grads]) -> bool:
        self.kept.append((parameters, compute))
        return True


def test_weights_gradients_can_wait() -> None:
    layer = nn.Linear(32, 16)
    use_float8(layer, filter=lambda *_: True, report=lambda _: None)
    x, keeper = drawn(4, 32).float().requires_grad_(), Keeper()
    layer(x).sum().backward()
    wished = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    with kept_by(keeper):
        result = layer(x)
    result.sum().backward()
    assert layer.weight.grad is None
    ((parameters, compute),) = keeper.kept
    assert parameters == [layer.weight, layer.bias]
    for found, other in zip(compute(), wished, strict=True):
        assert torch.equal(found, other)


def test_bad_input_is_told() -> None:
    x, weight = torch.ones(2, 32), torch.ones(16, 32)
    with pytest.raises(ShapeError, match=r"the recipe is 'blockwise'\. Give one of tensorwise, rowwise"):
        float8_linear(x, weight, recipe="blockwise")
    with pytest.raises(ShapeError, match=r"x is torch.float32 of shape \(2, 31\), the weight has \(16, 32\)"):
        float8_linear(x[:, 1:], weight)
    with pytest.raises(ShapeError, match=r"shape \(15, 32\). Give multiples of 16"):
        float8_linear(x, weight[1:])
    leaf = weight.clone().requires_grad_()
    with pytest.raises(LayoutError, match="asked for its own derivative"):
        torch.autograd.grad(float8_linear(x, leaf).sum(), leaf, create_graph=True)


def test_gpus_without_float8_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    float8._obstacle_on.cache_clear()
    assert "compute capability is 8.0" in float8._obstacle_on(torch.device("cuda", 0))
    float8._obstacle_on.cache_clear()
    monkeypatch.setenv("DISTTRAIN_KERNELS", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(float8, "obstacle", lambda _: "the GPU is old.")
    with pytest.raises(BackendError, match="the GPU is old"):
        cast(torch.ones(2, 16), E4, by_rows=False)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(48, 32)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.odd, self.tied, self.head = nn.Linear(32, 33), nn.Linear(32, 48, bias=False), nn.Linear(32, 48)
        self.tied.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def test_a_model_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    before = {name: id(tensor) for name, tensor in model.named_parameters()}
    found = use_float8(model)
    assert capsys.readouterr().out.splitlines() == [
        "use_float8: Model: 6 linear layers",
        "use_float8: left odd: sizes are no multiples of 16",
        "use_float8: left tied: other modules share the weight",
        "use_float8: left head: it is the head",
    ]
    assert [one.name for one in found][:2] == ["blocks.0.query", "blocks.0.key"]
    assert {name: id(tensor) for name, tensor in model.named_parameters()} == before
    assert isinstance(model.blocks[0].query, nn.Linear)
    assert type(model.blocks[0].query) is Float8Linear
    assert model.state_dict().keys() == Model().state_dict().keys()
    assert not use_float8(model, report=lambda _: None)
    copy.deepcopy(model)(torch.arange(4)[None]).sum().backward()
    chosen = use_float8(Model(), filter=lambda name, _: name.endswith(("query", "head")), report=lambda _: None)
    assert [one.name for one in chosen] == ["blocks.0.query", "blocks.1.query", "head"]
    with pytest.raises(ShapeError, match="the recipe is 'fast'"):
        use_float8(model, "fast")


def test_a_model_within_autocast_and_checkpoints() -> None:
    torch.manual_seed(0)
    model = Model()
    use_float8(model, report=lambda _: None)
    tokens = torch.arange(12).view(2, 6)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.blocks[0](torch.ones(1, 2, 32)).dtype == torch.bfloat16
    x = model.embedding(tokens).detach()
    model.blocks[0](x).sum().backward()
    wished = model.blocks[0].query.weight.grad
    model.zero_grad()
    checkpoint(model.blocks[0], x, use_reentrant=False).sum().backward()
    assert torch.equal(model.blocks[0].query.weight.grad, wished)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo makes an object of the autograd function
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_graph_casts_what_several_layers_take_once(recipe: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = Attention()
    use_float8(block, recipe, filter=lambda *_: True, report=lambda _: None)
    ops: list[Counter[str]] = []

    def counted(graph: torch.fx.GraphModule, _: Any) -> Any:
        ops.append(Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function"))
        return make_boxed_func(graph.forward)

    x = drawn(2, 5, 32).float().requires_grad_()
    block(x).sum().backward()
    wished, x.grad = x.grad, None
    backend = aot_autograd(fw_compiler=counted, partition_fn=min_cut_rematerialization_partition)
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    compiled(x).sum().backward()
    assert torch.equal(x.grad, wished)
    forward, backward = ops
    assert forward["disttrain.float8_mm.default"] == 3
    assert forward["disttrain.float8_cast.default"] == 1 + 3
    assert backward["disttrain.float8_mm.default"] == 6
    assert backward["disttrain.float8_cast.default"] == 3


def test_a_gathered_weight_is_its_values_to_others() -> None:
    codes, scales = cast(whole_numbers(32, 16), E4, by_rows=True, wants_columns=False)[:2]
    weight = nn.Parameter(Float8Weight(codes, scales, 1, torch.bfloat16))
    assert weight.dtype == torch.bfloat16
    x = whole_numbers(3, 16, seed=1).bfloat16()
    result = F.linear(x, weight)
    assert torch.equal(result, F.linear(x, whole_numbers(32, 16).bfloat16()))
    result.sum().backward()
    assert weight.grad.shape == (32, 16)
    with torch.no_grad(), pytest.raises(LayoutError, match="gathered in float8 is to be written to"):
        weight.zero_()


def test_beside_other_kernels() -> None:
    torch.manual_seed(0)
    model = Llama(PRESETS["tiny"])
    model.init()
    tokens = torch.randint(0, 256, (2, 16))
    use_float8(model, report=lambda _: None)
    wished = model(tokens)
    found = use_kernels(model, report=lambda _: None)
    assert Counter(one.what for one in found)["SwiGLU"] == 2
    torch.testing.assert_close(model(tokens), wished, atol=0.05, rtol=0.05)
    assert type(model.blocks[0].feed_forward.gate) is Float8Linear


def test_a_layer_made_on_meta() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 16), nn.ReLU())
        use_float8(model, filter=lambda *_: True, report=lambda _: None)
        assert model(torch.empty(3, 32)).shape == (3, 16)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    assert torch.equal(model(torch.ones(3, 32)), torch.full((3, 16), 33.0))
