"""use_experts on models that were not written for it: what it takes, what it leaves, and the same numbers."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from disttrain.experts import use_experts
from disttrain.experts.models import layers
from disttrain.experts.models.stacking import stacked
from disttrain.kernels import Sparse24, use_kernels, use_sparse24
from disttrain.pipelining import split_blocks
from tests.cases.expert_blocks import BLOCKS, D, E, GatedMlp, H, LoopOverHits, SortedRows
from tests.cases.expert_models import CONFIGS, made


def quietly(model: nn.Module) -> Any:
    return use_experts(model, report=lambda _: None)


def assert_same(model: nn.Module, other: nn.Module, x: torch.Tensor) -> None:
    """Outputs, and gradients of x and of all parameters."""
    outs, grads = [], []
    for each in (model, other):
        given = x.clone().requires_grad_()
        torch.manual_seed(0)
        out = each(given * 1)
        tensors = out if isinstance(out, tuple) else (out,)
        sum(
            (one * torch.linspace(-1, 1, one.numel(), dtype=one.dtype).view(one.shape)).sum() for one in tensors
        ).backward()
        outs.append(tensors)
        grads.append([given.grad, *(parameter.grad for parameter in each.parameters())])
    torch.testing.assert_close(*outs)
    names = ["x", *(name for name, _ in model.named_parameters())]
    for name, one, two in zip(names, *grads, strict=True):
        expected = torch.zeros_like(two) if one is None else one
        torch.testing.assert_close(two, expected, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_as_people_write_them(name: str) -> None:
    torch.manual_seed(0)
    model = BLOCKS[name]().double()
    other = copy.deepcopy(model)
    state = torch.get_rng_state()
    result = quietly(other)
    assert torch.equal(state, torch.get_rng_state())
    assert result.taken
    assert not result.left
    assert isinstance(other, type(model))
    assert list(model.state_dict()) == list(other.state_dict())
    x = torch.randn(14, D).double() if name in ("late_softmax", "biases") else torch.randn(2, 7, D).double()
    for is_training in (True, False):
        assert_same(model.train(is_training), other.train(is_training), x)
        model.zero_grad()
        other.zero_grad()
    assert not quietly(other).taken


@pytest.mark.parametrize("name", BLOCKS)
def test_pickles_and_copies_compute_the_same(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(BLOCKS[name](), BLOCKS[name]()).double().eval()
    kind = type(model[0])
    quietly(model)
    file = io.BytesIO()
    torch.save(model, file)
    # As in a process that has made no class yet.
    layers._class_of.cache_clear()
    read = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert type(read[0]) is type(read[1])
    assert isinstance(read[0], kind)
    assert type(copy.deepcopy(model)[0]) is type(copy.copy(model[0])) is type(model[0])
    x = torch.randn(14, D).double() if name in ("late_softmax", "biases") else torch.randn(2, 7, D).double()
    for other in (read, copy.deepcopy(read)):
        assert_same(model[1], other[1], x)
        model.zero_grad()


@pytest.mark.parametrize("name", CONFIGS)
def test_models_of_transformers(name: str) -> None:
    model = made(name)
    other = copy.deepcopy(model)
    result = quietly(other)
    assert result.taken
    assert not result.left
    assert list(model.state_dict()) == list(other.state_dict())
    tokens = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(1))
    outs = []
    for each in (model, other):
        torch.manual_seed(0)
        out = each(tokens, labels=tokens)
        out.loss.backward()
        outs.append(out.logits)
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-6, atol=1e-9)
    for (path, one), (_, two) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        if one.grad is None:
            assert two.grad is None or not two.grad.any(), path
        else:
            torch.testing.assert_close(
                two.grad, one.grad, rtol=1e-6, atol=1e-9, msg=lambda text, path=path: f"{path}: {text}"
            )


class Odd(nn.Module):
    """Experts that are given a token each, which no other way to compute does."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(GatedMlp() for _ in range(E))
        self.top_k = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        capacity = len(x) * 2 // E
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == index)
            token, slot = token[:capacity], slot[:capacity]
            out[token] += weights[token, slot, None] * expert(x[token])
        return out


class SharedByFactors(nn.Module):
    """Experts that all tokens go through, each times a factor of its own: called as those of sorted rows."""

    def __init__(self, num_experts: int = 1) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Parameter(torch.randn(num_experts, H, D) / 3) for _ in range(2))
        self.down_proj = nn.Parameter(torch.randn(num_experts, D, H) / 3)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(1, -1, x.shape[-1]).expand(len(self.gate_proj), -1, -1)
        factors = factors.reshape(-1, len(self.gate_proj), 1).transpose(0, 1)
        hidden = self.act_fn(rows @ self.gate_proj.mT) * (rows @ self.up_proj.mT) * factors
        return (hidden @ self.down_proj.mT).sum(0).view(x.shape)


def _quantized() -> nn.Module:
    model = SortedRows()
    model.w1 = nn.Parameter(model.w1.detach().to(torch.int8), requires_grad=False)
    return model


def _with_scales() -> nn.Module:
    model = SortedRows()
    model.register_buffer("w1_scale", torch.ones(E))
    return model


def _wrapped() -> nn.Module:
    model = SortedRows()
    model.forward = model.forward  # type: ignore[method-assign]
    return model


def _of_ones_own() -> nn.Module:
    model = made("Mixtral").model.layers[0].mlp
    model.experts.config._experts_implementation = "eager"
    vars(model.experts.config)["_experts_implementation_internal"] = "mine"
    return model


def test_sparse_weights_are_still_multiplied_together(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = LoopOverHits()
    quietly(model)
    use_sparse24(model, filter=lambda name, _: name.startswith("experts") and "w2" not in name, report=lambda _: None)
    Sparse24(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(2, 7, D)
    expected = model(x)[0]
    monkeypatch.setattr(GatedMlp, "forward", None)  # of one expert alone
    assert torch.equal(model(x)[0], expected)


def _with_dropout() -> nn.Module:
    model = LoopOverHits()
    model.experts = nn.ModuleList(DroppingMlp(0.1) for _ in model.experts)
    return model


def _without_products() -> nn.Module:
    experts = made("Mixtral").model.layers[0].mlp.experts
    experts.gate_up_proj = nn.Parameter(torch.randn(7, 24, 16))  # of experts that only hand tokens on, too
    return experts


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Odd, "what it computes on a small copy is none of the computations that are known"),
        (SharedByFactors, "what it computes on a small copy is none of the computations that are known"),
        (lambda: SharedByFactors(2), "what it computes on a small copy is none of the computations that are known"),
        (_quantized, "it has parameters of torch.int8"),
        (_with_dropout, "it has dropout of 0.1, which no product of all experts computes"),
        (
            _without_products,
            (
                "its parameters have no form that is known: gate_up_proj of (7, 24, 16) and down_proj of (5, 16, 12)"
                " are no experts' two products"
            ),
        ),
        (
            lambda: torch.nn.ModuleDict({"experts": torch.nn.ModuleDict({"expert_0": GatedMlp()})}),
            "its experts lie in a ModuleDict, and those in ModuleLists are known",
        ),
        (_with_scales, "it has w1_scale besides its experts' weights"),
        (_wrapped, "its forward was replaced on the module itself, as some libraries do"),
        (_of_ones_own, "its experts_implementation is 'mine', which is none of transformers' own"),
    ],
)
def test_what_is_left_has_a_reason(make: Any, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = make()
    kind = type(model)
    result = use_experts(model)
    assert not result.taken
    assert [one.why for one in result.left] == [why]
    assert type(model) is kind
    assert f"stays as it is: {why}\n" in capsys.readouterr().out


def test_sizes_of_real_models_on_the_meta_device() -> None:
    import transformers  # here, since it takes seconds

    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(num_hidden_layers=2))
        lists = nn.ModuleList([LoopOverHits(64)])
    assert [one.name for one in quietly(model).taken] == [f"model.layers.{layer}.mlp.experts" for layer in (0, 1)]
    assert type(model.model.layers[0].mlp.experts) is type(model.model.layers[1].mlp.experts)
    assert [one.name for one in quietly(lists).taken] == ["0"]


def test_generating_and_checkpoints_of_activations() -> None:
    model = made("Mixtral").eval()
    other = copy.deepcopy(model)
    quietly(other)
    tokens = torch.randint(3, 32, (2, 4), generator=torch.Generator().manual_seed(0))
    texts = [each.generate(tokens, max_new_tokens=4, do_sample=False) for each in (model, other)]
    assert torch.equal(*texts)
    other.activation_checkpointing_enable()
    for each in (model.train(), other.train()):
        torch.manual_seed(0)
        each(tokens, labels=tokens, use_cache=False).loss.backward()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)


def test_indices_that_name_no_expert_are_dropped() -> None:
    experts = made("Mixtral").model.layers[0].mlp.experts
    other = copy.deepcopy(experts)
    quietly(other)
    x = torch.randn(6, 16).double()
    indices = torch.tensor([[0, 5], [5, 5], [1, 2], [4, 5], [3, 3], [5, 0]])
    weights = torch.rand(6, 2).double()
    torch.testing.assert_close(other(x, indices, top_k_weights=weights), experts(x, indices, top_k_weights=weights))


def test_adapters_of_peft() -> None:
    peft = pytest.importorskip("peft")
    model = nn.ModuleDict({"block": LoopOverHits().double()})
    other = copy.deepcopy(model)
    quietly(other)
    x = torch.randn(2, 7, D).double()
    outs = []
    for each in (model, other):
        torch.manual_seed(0)
        adapted = peft.inject_adapter_in_model(
            peft.LoraConfig(r=2, target_modules=["w1", "w2"], init_lora_weights=False), each
        )
        outs.append(adapted["block"](x * 1)[0])
        outs[-1].sum().backward()
    torch.testing.assert_close(*outs)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(one.grad, two.grad)


def test_an_activation_that_is_replaced_later() -> None:
    model = LoopOverHits().double()
    experts = made("Mixtral").model.layers[0].mlp.experts
    other = copy.deepcopy(experts)
    quietly(model)
    quietly(other)
    for each in (experts, other):
        each.act_fn = nn.Tanh()
    x, indices, weights = torch.randn(6, 16).double(), torch.randint(0, 5, (6, 2)), torch.rand(6, 2).double()
    torch.testing.assert_close(other(x, indices, weights), experts(x, indices, weights))
    for expert in model.experts:
        expert.act_fn = nn.Tanh()
    same = LoopOverHits().double()
    same.load_state_dict(model.state_dict())
    for expert in same.experts:
        expert.act_fn = nn.Tanh()
    tokens = torch.randn(2, 7, D).double()
    torch.testing.assert_close(model(tokens * 1), same(tokens * 1))


class DroppingMlp(GatedMlp):
    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(super().forward(x))


def test_dropout_that_is_set_later() -> None:
    model = LoopOverHits().double()
    model.experts = nn.ModuleList(DroppingMlp() for _ in model.experts).double()
    other = copy.deepcopy(model)
    assert quietly(other).taken
    x = torch.randn(2, 7, D).double()
    assert_same(model, other, x)
    for each in (model, other):
        each.zero_grad()
        for expert in each.experts:
            expert.dropout.p = 1.0
    assert_same(model, other, x)


def test_weights_that_lie_side_by_side_are_not_copied() -> None:
    storage = torch.randn(4, 3, 6)
    apart = [nn.Parameter(part) for part in storage]
    result = stacked(apart)
    assert result.data_ptr() == storage.data_ptr()
    result.mul(torch.arange(4.0)[:, None, None]).sum().backward()
    assert [part.grad.unique().tolist() for part in apart] == [[0.0], [1.0], [2.0], [3.0]]
    assert stacked(apart[::-1]).data_ptr() != storage.data_ptr()
    assert torch.equal(stacked(apart[::2]), storage[::2])
    assert stacked(apart[::2]).data_ptr() == storage.data_ptr()


@pytest.mark.parametrize("is_first", [True, False])
def test_with_use_kernels(is_first: bool) -> None:
    model = nn.ModuleDict({"list": LoopOverHits(), "sorter": BLOCKS["sorted_rows"]()}).double()
    other = copy.deepcopy(model)
    calls = [quietly, lambda each: use_kernels(each, report=lambda _: None)]
    for call in calls if is_first else calls[::-1]:
        call(other)
    x = torch.randn(2, 7, D).double()
    assert_same(model["list"], other["list"], x)
    assert_same(model["sorter"], other["sorter"], x)
    assert all(other["list"].experts._is_plain(expert) for expert in other["list"].experts)


def test_a_block_gives_the_dims_that_it_gave() -> None:
    block = made("Llama4Text").model.layers[0].feed_forward
    other = copy.deepcopy(block)
    assert quietly(other).taken
    x = torch.randn(2, 3, 16).double()
    for given in (x, x[0]):
        assert [one.shape for one in other(given)] == [one.shape for one in block(given)]


def test_stages_with_experts_pickle_and_copy() -> None:
    model = made("Mixtral").eval()
    tokens = torch.randint(0, 32, (2, 9))
    expected = model(tokens).logits
    quietly(model)
    stages = split_blocks(model, 2).stages
    for stage in stages:
        torch.save(stage, file := io.BytesIO())
        read = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        for other in (read, copy.deepcopy(stage)):
            assert type(other) is type(stage)
            assert list(other.state_dict()) == list(stage.state_dict())
    out: Any = tokens
    for stage in copy.deepcopy(stages):
        out = stage(out)
    torch.testing.assert_close(out.logits, expected)
