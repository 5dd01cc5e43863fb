"""Losses that keep loads even, against transformers and the papers' formulas; the update of the bias; statistics."""

from __future__ import annotations

import importlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils.checkpoint import checkpoint

import disttrain
from disttrain.errors import RoutingError, ShapeError
from disttrain.experts import (
    Balance,
    Router,
    RouterRule,
    balance_loss,
    choose,
    expert_numbers,
    read_statistics,
    router_numbers,
    set_loss_scale,
    update_expert_bias,
    update_expert_biases,
    z_loss,
)
from disttrain.reports import PAGE_BYTES
from disttrain.trackers import track
from tests.cases.kernels import drawn

HIDDEN = 6
MASK = torch.tensor([True, True, False, True, True, True, False, False, True, True, True, True])


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("has_mask", [False, True])
def test_the_balance_loss_as_transformers_computes_it(family: str, has_mask: bool) -> None:
    # Here: transformers takes seconds to load.
    theirs = importlib.import_module(f"transformers.models.{family}.modeling_{family}").load_balancing_loss_func
    rule = RouterRule(5, 2, score="softmax_of_chosen" if family == "gpt_oss" else "softmax")
    mask = MASK if has_mask else None
    results = []
    for dtype in (torch.float32, torch.float64):
        logits = drawn(12, 5, dtype=dtype).requires_grad_()
        routing = choose(logits, rule, mask=mask)
        ours = balance_loss(routing, rule, mask=mask, is_per_choice=False)
        ours.backward()
        leaf = drawn(12, 5, dtype=dtype).requires_grad_()
        attention_mask = None if mask is None else mask.view(2, 6).long()
        wanted = theirs((leaf,), 5, 2, attention_mask)
        wanted.backward()
        torch.testing.assert_close(ours, wanted.to(dtype))
        torch.testing.assert_close(logits.grad, leaf.grad)
        results.append(ours.double())
        torch.testing.assert_close(balance_loss(routing, rule, mask=mask), ours / 2)
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-6)


def deepseek_loss(scores: torch.Tensor, rule: RouterRule, chosen: torch.Tensor) -> torch.Tensor:
    """Equations 17 to 20 of DeepSeek-V3's report, for one sequence, without alpha."""
    tokens, experts = scores.shape
    share = scores / scores.sum(1, keepdim=True)
    loss = scores.new_zeros(())
    for expert in range(experts):
        count = sum(expert in chosen[token].tolist() for token in range(tokens))
        loss = loss + experts / (rule.top_k * tokens) * count * share[:, expert].sum() / tokens
    return loss


@pytest.mark.parametrize("counts_by_score", [False, True])
def test_the_loss_over_sequences_as_deepseek_writes_it(counts_by_score: bool) -> None:
    rule = RouterRule(6, 2, score="sigmoid", num_groups=3, top_groups=2)
    bias = torch.linspace(-0.5, 0.5, 6)
    leaves = [drawn(12, 6).requires_grad_() for _ in range(2)]
    routing = choose(leaves[0], rule, bias)
    ours = balance_loss(routing, rule, num_sequences=3, counts_by_score=counts_by_score)
    scores = leaves[1].sigmoid()
    chosen = scores.topk(2).indices if counts_by_score else routing.indices
    assert not torch.equal(scores.topk(2).indices, routing.indices)
    parts = zip(scores.chunk(3), chosen.chunk(3), strict=True)
    wanted = torch.stack([deepseek_loss(of_sequence, rule, choices) for of_sequence, choices in parts]).mean()
    torch.testing.assert_close(ours, wanted)
    ours.backward()
    wanted.backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)


def test_losses_of_sequences_without_padding() -> None:
    rule = RouterRule(5, 2)
    mask = MASK.clone()
    mask[8:] = False  # the third sequence has none
    leaf = drawn(12, 5).requires_grad_()
    routing = choose(leaf, rule, mask=mask)
    for loss in (balance_loss, z_loss):
        ours = loss(routing, rule, mask=mask, num_sequences=3)
        parts = [(leaf[:4][mask[:4]]), leaf[4:8][mask[4:8]]]
        wanted = torch.stack([loss(choose(part, rule), rule) for part in parts]).mean()
        torch.testing.assert_close(ours, wanted)
        grads = [torch.autograd.grad(value, leaf, retain_graph=True)[0] for value in (ours, wanted)]
        torch.testing.assert_close(grads[0], grads[1])
    with pytest.raises(ShapeError, match="12 tokens don't divide into 5 sequences"):
        balance_loss(routing, rule, num_sequences=5)


def test_even_loads_give_one_and_the_worst_gives_the_number_of_experts() -> None:
    rule = RouterRule(4, 1)
    even = choose(10 * torch.eye(4, dtype=torch.float64), rule)
    torch.testing.assert_close(balance_loss(even, rule).item(), 1.0)
    worst = choose(torch.tensor([[1e3, 0.0, 0, 0]] * 3, dtype=torch.float64), rule)
    torch.testing.assert_close(balance_loss(worst, rule).item(), 4.0)
    torch.testing.assert_close(z_loss(worst, rule).item(), 1e6)


def test_no_token_gives_no_loss() -> None:
    rule = RouterRule(4, 2)
    for logits, mask in ((torch.zeros(0, 4), None), (drawn(3, 4).float(), torch.zeros(3, dtype=torch.bool))):
        leaf = logits.clone().requires_grad_()
        routing = choose(leaf, rule, mask=mask)
        total = balance_loss(routing, rule, mask=mask) + z_loss(routing, rule, mask=mask)
        assert total.item() == 0
        total.backward()
        assert leaf.grad is not None
        assert not leaf.grad.any()
    router = Router(HIDDEN, rule, Balance(aux_loss_coeff=0.1, over="sequence"))
    for shape in ((0, 3, HIDDEN), (2, 0, HIDDEN)):
        assert router(torch.zeros(shape)).indices.shape == (0, 2)
    assert read_statistics(router)[""].num_tokens == 0
    assert expert_numbers(read_statistics(router)) == {}


def plain(module: Router, x: torch.Tensor, mask: torch.Tensor | None) -> Any:
    return module(x, mask)


def with_recomputation(module: Router, x: torch.Tensor, mask: torch.Tensor | None) -> Any:
    return checkpoint(module, x, mask, use_reentrant=False)


def with_reentrant_recomputation(module: Router, x: torch.Tensor, mask: torch.Tensor | None) -> Any:
    return checkpoint(lambda x: tuple(module(x, mask)), x, use_reentrant=True)


def compiled(module: Router, x: torch.Tensor, mask: torch.Tensor | None) -> Any:
    return torch.compile(module, backend="aot_eager", fullgraph=True)(x, mask)


def compiled_then_recomputed(module: Router, x: torch.Tensor, mask: torch.Tensor | None) -> Any:
    return checkpoint(torch.compile(module, backend="aot_eager", fullgraph=True), x, mask, use_reentrant=False)


def recomputed_within_a_graph(module: Router, x: torch.Tensor, mask: torch.Tensor | None) -> Any:
    def run(x: torch.Tensor) -> Any:
        return checkpoint(lambda x: tuple(module(x, mask)), x, use_reentrant=False)

    return torch.compile(run, backend="aot_eager", fullgraph=True)(x)


WAYS: list[Callable[..., Any]] = [
    plain,
    with_recomputation,
    with_reentrant_recomputation,
    compiled,
    compiled_then_recomputed,
    recomputed_within_a_graph,
]


@pytest.mark.parametrize("way", WAYS)
def test_a_step_gives_the_gradients_of_both_losses_and_counts_once(way: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    rule = RouterRule(4, 2, score="sigmoid", scale=2.0)
    balance = Balance(aux_loss_coeff=0.3, z_loss_coeff=0.2, over="sequence", bias_update_rate=0.1)
    router = Router(HIDDEN, rule, balance)
    x, mask = drawn(3, 4, HIDDEN).float(), MASK.view(3, 4)
    for scale in (1.0, 0.5):
        set_loss_scale(router, scale)
        router.zero_grad()
        leaf = x.clone().requires_grad_()
        weights, indices, *_ = way(router, leaf, mask)
        factors = drawn(12, 4, seed=8).float()
        kept = torch.where(mask.view(12, 1), indices, 0)
        (weights * factors.gather(1, kept)).sum().backward()
        # Without the router: the losses are added to the model's own.
        other, weight = x.clone().requires_grad_(), router.weight.detach().clone().requires_grad_()
        routing = choose(nn.functional.linear(other.view(12, HIDDEN), weight), rule, mask=MASK)
        loss = (routing.weights * factors.gather(1, kept)).sum()
        options: dict[str, Any] = {"mask": MASK, "num_sequences": 3}
        losses = balance_loss(routing, rule, **options), z_loss(routing, rule, **options)
        (loss + scale * (0.3 * losses[0] + 0.2 * losses[1])).backward()
        torch.testing.assert_close(router.weight.grad, weight.grad)
        torch.testing.assert_close(leaf.grad, other.grad)
        told = read_statistics(router)[""]
        assert told.tokens_per_expert == tuple(routing.indices.flatten().bincount(minlength=5).tolist()[:4])
        assert told.num_tokens == int(MASK.sum())
        assert told.balance_loss == pytest.approx(losses[0].item(), rel=1e-5)
        assert told.z_loss == pytest.approx(losses[1].item(), rel=1e-5)
        share = (routing.scores / routing.scores.sum(1, keepdim=True))[MASK]
        assert told.entropy == pytest.approx(torch.special.entr(share).sum(1).mean().item(), rel=1e-5)
    load = 2 * torch.tensor(told.tokens_per_expert)
    update_expert_biases(router)
    assert router.expert_bias is not None
    torch.testing.assert_close(router.expert_bias, 0.1 * (load.double().mean() - load).sign().float())
    before = router.expert_bias.clone()
    update_expert_biases(router)  # nothing has been routed since
    assert torch.equal(router.expert_bias, before)


def test_in_evaluation_nothing_is_counted_and_no_loss_taken() -> None:
    router = Router(HIDDEN, RouterRule(4, 1), Balance(aux_loss_coeff=0.3)).eval()
    router(drawn(5, HIDDEN).float()).weights.sum().backward()
    assert router.weight.grad is not None
    # The only weight is divided by itself, up to rounding.
    assert router.weight.grad.abs().max() < 1e-5
    assert read_statistics(router)[""].num_tokens == 0


def test_a_forward_without_gradients_is_an_evaluation() -> None:
    router = Router(HIDDEN, RouterRule(4, 1))
    x = drawn(5, HIDDEN).float()
    with torch.no_grad():
        router(x)
    with torch.inference_mode():
        router(x)
        router.counters.add_dropped(torch.tensor(2))
    assert read_statistics(router)[""].num_tokens == read_statistics(router)[""].num_dropped == 0
    # Nor is the first forward of a checkpoint, which counts.
    out = checkpoint(lambda x: router(x).weights, x.requires_grad_(), use_reentrant=True)
    out.sum().backward()
    assert read_statistics(router)[""].num_tokens == 5


def test_the_bias_evens_loads_out() -> None:
    router = Router(HIDDEN, RouterRule(8, 2, score="sigmoid"), Balance(bias_update_rate=0.01))
    with torch.no_grad():
        router.weight.copy_(drawn(8, HIDDEN, seed=4) / 3)
    x = drawn(256, HIDDEN).float() + 1
    loads = []
    for _ in range(60):
        router(x)
        update_expert_biases(nn.Sequential(router))
        loads.append(read_statistics(router)[""].max_load)
    assert loads[0] > 1.5
    assert loads[-1] < 1.15


def test_one_update_of_the_bias() -> None:
    for is_centered, wanted in ((False, [-0.1, 0.1, 0.1, 0.0]), (True, [-0.125, 0.075, 0.075, -0.025])):
        bias = torch.zeros(4)
        update_expert_bias(bias, torch.tensor([6, 1, 2, 3]), 0.1, is_centered=is_centered)
        torch.testing.assert_close(bias, torch.tensor(wanted))


def test_numbers_for_reports_and_trackers() -> None:
    model = nn.ModuleDict({name: Router(2, RouterRule(2, 1)) for name in ("first", "second")})
    routers = list(model.values())
    with torch.no_grad():
        for router in routers:
            router.weight.copy_(torch.eye(2))
    routers[0](torch.tensor([[1.0, 0], [1, 0], [1, 0], [0, 1]]))
    routers[1](torch.tensor([[1.0, 0], [1, 0]]))
    routers[1].counters.add_dropped(torch.tensor(1))
    told = read_statistics(model)
    assert [each.tokens_per_expert for each in told.values()] == [(3, 1), (2, 0)]
    assert [each.max_load for each in told.values()] == [1.5, 2.0]
    assert [each.num_idle for each in told.values()] == [0, 1]
    quarter = 0.25 * math.log2(4) + 0.75 * math.log2(4 / 3)
    assert told["first"].load_entropy == pytest.approx(quarter)
    numbers = expert_numbers(told)
    assert numbers["experts/max_load"] == 2.0
    assert numbers["experts/load_entropy"] == 0
    assert numbers["experts/idle"] == 1
    assert numbers["experts/dropped_share"] == 0.5
    by_router = router_numbers(told, has_experts=True)
    assert by_router["experts max_load/first"] == 1.5
    assert by_router["experts load first/0"] == 1.5
    assert by_router["experts load second/1"] == 0.0
    assert expert_numbers(read_statistics(model)) == {}  # read already
    assert read_statistics(nn.Linear(1, 1)) == {}


def test_nothing_is_asked_of_the_host() -> None:
    # A fake tensor refuses to tell its values.
    with FakeTensorMode():
        rule = RouterRule(8, 2, score="sigmoid", num_groups=4, top_groups=2)
        for over in ("rank", "sequence"):
            balance = Balance(aux_loss_coeff=0.1, z_loss_coeff=0.1, over=over, bias_update_rate=0.1)
            router = Router(HIDDEN, rule, balance)
            mask = torch.empty(3, 4, dtype=torch.bool)
            for given in (None, mask):
                router(torch.empty(3, 4, HIDDEN), given).weights.sum().backward()
            router.counters.add_dropped(torch.empty((), dtype=torch.int64))
            update_expert_biases(router)
            set_loss_scale(router, torch.empty(()))
            with pytest.raises(DataDependentOutputException):
                read_statistics(router)


class Recorded:
    """A tracker that keeps what it is given."""

    name = "recorded"

    def __init__(self) -> None:
        self.numbers: dict[int, dict[str, float]] = defaultdict(dict)

    def open(self, run_id: str | None, first_step: int, config: Mapping[str, Any]) -> str:
        return "run"

    def log(self, numbers: Mapping[str, float], step: int, time_s: float) -> None:
        self.numbers[step].update(numbers)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_reports_reach_trackers_under_names_in_groups() -> None:
    router = Router(HIDDEN, RouterRule(4, 2))
    tracker = Recorded()
    with track(tracker) as tracking:
        for step in range(2):
            router(drawn(5, HIDDEN).float())
            told = read_statistics(router)
            disttrain.report(step=step, loss=1.0, **expert_numbers(told))
            tracking.write(step, router_numbers(told))
    of_step = tracker.numbers[1]
    assert of_step["loss"] == 1.0
    assert of_step["experts/max_load"] == of_step["experts max_load/router"] >= 1
    # A page of reports holds them.
    assert len(json.dumps({**expert_numbers(told), "loss": 1.0})) < PAGE_BYTES / 4


def test_nan_that_nobody_waited_for_is_told_at_the_reading() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(Router(HIDDEN, RouterRule(4, 2)))
    x = drawn(3, HIDDEN).float()
    x[1, 0] = math.nan
    weights = torch.compile(model, backend="aot_eager", fullgraph=True)(x).weights
    assert weights.isnan().any(1).tolist() == [False, True, False]
    with pytest.raises(RoutingError, match="read_statistics: tokens had nan in the scores of 0"):
        read_statistics(model)
    assert read_statistics(model)["0"].num_tokens == 0


WRONG_BALANCES: dict[str, tuple[dict[str, Any], str]] = {
    "negative": ({"aux_loss_coeff": -0.1}, r"aux_loss_coeff is -0\.1"),
    "nan": ({"z_loss_coeff": math.nan}, "z_loss_coeff is nan"),
    "text": ({"bias_update_rate": "1"}, "bias_update_rate is '1'"),
    "scope": ({"over": "world"}, "over is 'world'. Give one of rank, sequence, batch"),
}


@pytest.mark.parametrize("case", WRONG_BALANCES)
def test_a_balance_that_makes_no_sense_is_refused(case: str) -> None:
    arguments, words = WRONG_BALANCES[case]
    with pytest.raises(RoutingError, match=f"Balance: {words}"):
        Balance(**arguments)


def test_losses_over_sequences_need_sequences() -> None:
    router = Router(HIDDEN, RouterRule(4, 2), Balance(aux_loss_coeff=0.1, over="sequence"))
    with pytest.raises(ShapeError, match="losses are taken over sequences, and tokens have shape"):
        router(drawn(4, HIDDEN).float())
