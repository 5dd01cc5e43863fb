"""A backward in two parts gives, bit for bit, the gradients of one."""

from __future__ import annotations

import copy
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from disttrain.pipelining import Backward, SplitPoint, pipeline, split_layers
from disttrain.pipelining.model import layers
from tests.cases.pipeline_backward import DIM, assert_equal, both_ways, random


def test_layers_that_were_split_are_pickled() -> None:
    stack = nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM))
    split_layers(stack)
    file = io.BytesIO()
    torch.save(stack, file)
    layers._joined.cache_clear()  # as in a process that has made no class yet
    read = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    x = random(3, DIM)
    assert torch.equal(read(x), stack(x))
    assert split_layers(read) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 7, 19), (7, 19), (1, 19), (2, 3, 4, 19)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer(dtype: torch.dtype, shape: tuple[int, ...], bias: bool) -> None:
    both_ways(nn.Linear(19, 23, bias=bias, dtype=dtype), lambda: random(*shape, dtype=dtype), num_layers=1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(19, 3, 4).movedim(0, -1).requires_grad_(),
        lambda: torch.randn(19, 4).t().requires_grad_(),
        lambda: torch.randn(4, 38).narrow(1, 0, 19).requires_grad_(),
        lambda: random(19),
        lambda: torch.randn(3, 19),
    ],
    ids=["moved", "transposed", "strided", "vector", "no-gradient"],
)
def test_a_linear_layer_whose_input_lies_otherwise(make: Callable[[], torch.Tensor]) -> None:
    both_ways(nn.Linear(19, 5), make)
    both_ways(nn.Sequential(nn.Linear(19, 1), nn.Linear(1, 3)), make)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_embeddings_and_norms(dtype: torch.dtype) -> None:
    def tokens() -> torch.Tensor:
        return torch.randint(0, 11, (3, 5))

    stack = nn.Sequential(
        nn.Embedding(11, DIM, padding_idx=3, scale_grad_by_freq=True),
        nn.LayerNorm(DIM),
        nn.Linear(DIM, DIM),
        nn.LayerNorm(DIM, bias=False),
        nn.RMSNorm(DIM),
        nn.LayerNorm(DIM, elementwise_affine=False),
        nn.Embedding.from_pretrained(torch.ones(2, 2), sparse=True),
    )
    both_ways(stack[:-1].to(dtype), tokens, num_layers=5)
    assert split_layers(stack) == 5
    assert split_layers(stack) == 0


def test_what_is_left_to_w_is_not_computed_in_i() -> None:
    stack = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM, bias=False))
    split_layers(stack)
    x, backward = random(3, DIM), Backward()
    with backward.forward():
        y = stack(x)
    with torch.profiler.profile(acc_events=True) as in_i:
        backward.backward_input([y], [torch.ones_like(y)], [x])
    with torch.profiler.profile(acc_events=True) as in_w:
        backward.backward_weight()
    products = [sum(event.name == "aten::mm" for event in part.events()) for part in (in_i, in_w)]
    assert products == [2, 2]


def test_undivided_it_is_an_ordinary_backward() -> None:
    plain = nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM))
    split = copy.deepcopy(plain)
    split_layers(split)
    x, backward = random(3, DIM), Backward()
    plain(x).sum().backward()
    expected, x.grad = x.grad, None
    with backward.forward():
        loss = split(x).sum()
    (found, none) = backward.backward([loss], None, [x, 3])
    assert_equal([found, none, x.grad], [expected, None, None])
    assert_equal([p.grad for p in split.parameters()], [p.grad for p in plain.parameters()])
    split(x).sum().backward()
    assert_equal([p.grad for p in split.parameters()], [2 * p.grad for p in plain.parameters()])


class Odd(nn.Module):
    """Parameters in all places where one might overlook them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)
        self.a, self.b = (nn.Parameter(torch.randn(DIM, DIM)) for _ in range(2))
        self.apart = nn.Parameter(torch.randn(DIM))
        self.out = nn.Parameter(torch.randn(2))
        self.apart_layer = nn.Linear(DIM, DIM)
        self.unused = nn.Parameter(torch.randn(2))
        self.frozen = nn.Linear(DIM, DIM).requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = self.frozen(self.layer(x) @ (self.a @ self.b)) + self.apart_layer(torch.ones(DIM)[None])
        w = F.linear(z, self.layer.weight.t() @ self.a)  # of layers, too
        return z.view(-1)[:4], w.transpose(0, 1), self.apart.exp(), y, x, self.out, torch.ones(2)


def test_no_gradient_is_lost_and_none_raises() -> None:
    module = Odd()
    x, y = random(3, DIM), random(2)
    split = copy.deepcopy(module)
    split_layers(split)
    expected = module(x, y)
    grads = [torch.randn_like(output) for output in expected]
    torch.autograd.backward(expected[:-1], grads[:-1])
    backward, own_x, own_y = Backward(), x.detach().requires_grad_(), y.detach().requires_grad_()
    with backward.forward():
        outputs = split(own_x, own_y)
    assert_equal(backward.backward_input(outputs, grads, [own_x, own_y]), [x.grad, y.grad])
    backward.backward_weight()
    assert module.apart.grad is not None
    assert module.out.grad is not None
    assert_equal([p.grad for p in split.parameters()], [p.grad for p in module.parameters()])


def test_outputs_without_a_gradient_are_passed_over() -> None:
    layer, x = nn.Linear(DIM, DIM), random(2, DIM)
    backward = Backward()
    with backward.forward():
        y = layer(x)
    assert backward.backward_input([y, x], [None, None], [x, "text"]) == (None, None)
    assert backward.backward([torch.ones(2)], [None], [x]) == (None,)
    backward.backward_weight()
    assert layer.weight.grad is None


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, DIM)
        self.head = nn.Linear(DIM, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x))


@pytest.mark.parametrize("tied", [True, False])
def test_hooks_are_called_once_and_in_w(tied: bool) -> None:
    """Also where a layer leaves one share to W, and another share was computed in I."""
    if tied:
        module, x, num_params = Tied(), torch.randint(0, 11, (2, 3)), 1
    else:
        module, x, num_params = nn.Sequential(nn.Linear(DIM, DIM), nn.PReLU()), random(2, DIM), 3
    split = copy.deepcopy(module)
    split_layers(split)
    called: list[str] = []
    for one in (module, split):
        for parameter in one.parameters():
            parameter.register_hook(lambda grad: called.append("pre") or 2 * grad)
            parameter.register_post_accumulate_grad_hook(lambda _: called.append("post"))
    module(x).sum().backward()
    assert called == ["pre", "post"] * num_params
    called.clear()
    backward = Backward()
    with backward.forward():
        y = split(x).sum()
    backward.backward_input([y], None, [x])
    assert called == []
    backward.backward_weight()
    assert called == ["pre", "post"] * num_params
    assert_equal([p.grad for p in split.parameters()], [p.grad for p in module.parameters()])


class Checkpointed(nn.Module):
    def __init__(self, num_blocks: int, calls: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM), nn.PReLU())
            for _ in range(num_blocks)
        )
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(self._run, block, x, use_reentrant=False)
        return x

    def _run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(1)
        return block(x)


def test_a_checkpointed_block_is_computed_again_once() -> None:
    calls: list[int] = []
    split = both_ways(Checkpointed(4, calls), lambda: random(3, DIM))
    assert isinstance(split, Checkpointed)
    calls.clear()
    x, backward = random(3, DIM), Backward()
    split.calls = calls
    with backward.forward():
        y = split(x)
    assert len(calls) == 4
    backward.backward_input([y], [torch.ones_like(y)], [x])
    assert len(calls) == 8
    backward.backward_weight()
    assert len(calls) == 8


def test_functions_of_others_go_back_once() -> None:
    calls = []

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            calls.append(1)
            x, weight = ctx.saved_tensors
            return grad * weight, (grad * x).sum(0)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(DIM))
            self.layer = nn.Linear(DIM, DIM)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(Scale.apply(self.layer(x), self.scale))

    both_ways(Scaled(), lambda: random(3, DIM))
    assert len(calls) == 3 * 2


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_blocks() -> None:
    """They are one node of the graph; what they give their weights waits for W."""
    plain = nn.Sequential(MLP(), MLP(), nn.Linear(DIM, 3))
    compiled = copy.deepcopy(plain)
    assert split_layers(compiled) == 7
    for block in compiled[:2]:
        block.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        x, backward = random(3, DIM), Backward()
        y = plain(x)
        grad = torch.randn_like(y)
        y.backward(grad)
        with backward.forward():
            y = compiled(x)
        (found,) = backward.backward_input([y], [grad], [x])
        backward.backward_weight()
        assert_equal([found], [x.grad])
        assert_equal([p.grad for p in compiled.parameters()], [p.grad for p in plain.parameters()])


def test_a_stage_cut_along_its_graph() -> None:
    stages = pipeline(
        nn.Sequential(MLP(), MLP()), (torch.ones(3, DIM),), None, {"1": SplitPoint.BEGINNING}
    ).model.stages
    both_ways(stages[1], lambda: random(3, DIM), num_layers=2)


def test_autocast() -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM), nn.Linear(DIM, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.layers(x)

    both_ways(Cast(), lambda: random(2, 3, DIM))


def test_autocast_keeps_one_copy_of_a_weight_for_all_microbatches() -> None:
    layer = nn.Linear(DIM, DIM)
    split_layers(layer)
    inputs, casts, outputs = [random(2, DIM) for _ in range(3)], {}, []
    backwards = [Backward(casts) for _ in inputs]
    for x, backward in zip(inputs, backwards, strict=True):
        with backward.forward(), torch.autocast("cpu", dtype=torch.bfloat16):
            outputs.append(layer(x))
    assert len({output.grad_fn.saved_tensors[1].data_ptr() for output in outputs}) == len(casts) == 1
    for x, backward, output in zip(inputs, backwards, outputs, strict=True):
        backward.backward_input([output], [torch.ones_like(output)], [x])
        backward.backward_weight()
    found, layer.weight.grad = layer.weight.grad, None
    for x in inputs:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layer(x).sum().backward()
    assert_equal([found], [layer.weight.grad])


def test_a_weight_that_is_an_input_gets_its_gradient_in_i() -> None:
    layer = nn.Linear(DIM, DIM)
    split_layers(layer)
    x, backward = random(2, DIM), Backward()
    with backward.forward():
        y = layer(x)
    _, found = backward.backward_input([y], [torch.ones_like(y)], [x, layer.weight])
    assert_equal([found], [torch.ones_like(y).t() @ x])


def test_a_microbatch_waits_while_others_run() -> None:
    """Three are under way at once, as in a schedule without bubbles."""
    plain = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM))
    split = copy.deepcopy(plain)
    split_layers(split)
    inputs = [random(2, DIM) for _ in range(3)]
    for x in inputs:
        plain(x).square().sum().backward()
    backwards, losses = [Backward() for _ in inputs], []
    for x, backward in zip(inputs, backwards, strict=True):
        with backward.forward():
            losses.append(split(x).square().sum())
    for x, backward, loss in zip(inputs, backwards, losses, strict=True):
        assert_equal(backward.backward_input([loss], None, [x]), [x.grad])
    for backward in backwards:
        backward.backward_weight()
    assert_equal([p.grad for p in split.parameters()], [p.grad for p in plain.parameters()])


def test_activations_are_let_go_of_part_by_part() -> None:
    split = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM))
    split_layers(split)
    seen: list[Any] = []
    for layer in split:
        layer.register_forward_hook(lambda _m, inputs, _o: seen.append(weakref.ref(inputs[0])))
    x, backward = random(2, DIM), Backward()
    with backward.forward():
        y = split(2 * x)
    (_, before_gelu, before_last) = seen
    backward.backward_input([y], [torch.ones_like(y)], [x])
    assert before_gelu() is None
    assert before_last() is not None  # the weight's gradient is made of it
    backward.backward_weight()
    assert before_last() is None


@pytest.mark.parametrize("is_split", [True, False])
def test_products_add_to_earlier_gradients_where_they_may(is_split: bool) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8, bias=False)).double()
    plain = copy.deepcopy(module)
    split_layers(module)
    heard: list[int] = []
    module[2].weight.register_post_accumulate_grad_hook(lambda _: heard.append(1))
    for _ in range(3):
        x = torch.randn(4, 8, dtype=torch.float64)
        plain(x).sum().backward()
        before = module[0].weight.grad
        backward = Backward(fuses_sums=True)
        with backward.forward():
            outputs = [module(x)]
        grads = [torch.ones_like(outputs[0])]
        if is_split:
            backward.backward_input(outputs, grads, [])
            backward.backward_weight()
        else:
            backward.backward(outputs, grads, [])
        assert before is None or module[0].weight.grad is before
    assert len(heard) == 3
    for found, expected in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-13, atol=1e-13)
