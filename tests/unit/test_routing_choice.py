"""choose and Router against transformers' routers; ties, groups, bias, nan and padding against a loop over tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from disttrain.errors import RoutingError, ShapeError
from disttrain.experts import Balance, Router, RouterRule, choose, weights_before_experts
from disttrain.experts.routing.rule import SCORES
from tests.cases.kernels import drawn
from tests.cases.routing import HIDDEN, ROUTERS, by_expert, drawn_router


def router_like(theirs: Any, rule: RouterRule, balance: Balance | None = None) -> Router:
    has_bias = getattr(theirs, "bias", None) is not None
    correction = getattr(theirs, "e_score_correction_bias", None)
    router = Router(HIDDEN, rule, balance, bias=has_bias, has_expert_bias=correction is not None)
    router.load_state_dict(
        theirs.state_dict() if correction is None else {"weight": theirs.weight, "expert_bias": correction}
    )
    return router


@pytest.mark.parametrize("name", ROUTERS)
def test_as_transformers_routers(name: str) -> None:
    theirs, rule = drawn_router(name)
    router = router_like(theirs, rule)
    x, factors = drawn(23, HIDDEN).float(), drawn(23, rule.num_experts, seed=3).float()
    results = []
    for module in (theirs, router):
        leaf = x.clone().requires_grad_()
        if module is theirs:
            logits, weights, indices = module(leaf)
        else:
            weights, indices, _, logits = module(leaf.view(1, 23, HIDDEN))
        dense = by_expert(weights, indices, rule.num_experts)
        (dense * factors).sum().backward()
        results.append((dense, logits, leaf.grad, module.weight.grad))
    for ours, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, wanted)


@pytest.mark.parametrize("name", [name for name in ROUTERS if name.startswith("gpt_oss")])
def test_fp64_of_fp64_as_transformers_routers(name: str) -> None:
    theirs, rule = drawn_router(name)
    router = router_like(theirs, rule).double()
    _, wanted, indices = theirs.double()(drawn(9, HIDDEN))
    routing = router(drawn(9, HIDDEN))
    assert routing.weights.dtype == torch.float64
    assert torch.equal(routing.indices, indices)
    torch.testing.assert_close(routing.weights, wanted, rtol=1e-12, atol=1e-12)


def by_a_loop(scores: list[float], rule: RouterRule, bias: list[float]) -> list[int]:
    """The experts of a token, by the words of the rule."""
    compared = [score + shift for score, shift in zip(scores, bias, strict=True)]
    size = rule.group_size
    of_groups = []
    for group in range(rule.num_groups):
        within = sorted(compared[group * size : (group + 1) * size], reverse=True)
        of_groups.append(sum(within[: rule.group_top_scores]))
    groups = sorted(range(rule.num_groups), key=lambda group: (-of_groups[group], group))[: rule.top_groups]
    allowed = [expert for expert in range(rule.num_experts) if rule.num_groups == 1 or expert // size in groups]
    return sorted(allowed, key=lambda expert: (-compared[expert], expert))[: rule.top_k]


@st.composite
def rules(draw: st.DrawFn) -> RouterRule:
    num_groups, group_size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    top_groups = draw(st.integers(1, num_groups))
    top_k = draw(st.integers(1, top_groups * group_size if num_groups > 1 else group_size))
    return RouterRule(
        num_groups * group_size,
        top_k,
        score=draw(st.sampled_from(SCORES)),
        renormalize=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
        num_groups=num_groups,
        top_groups=top_groups,
        group_top_scores=draw(st.integers(1, group_size)) if num_groups > 1 else 2,
    )


@settings(max_examples=150, deadline=None)
@given(rules(), st.integers(0, 5), st.booleans(), st.booleans(), st.integers(0, 1 << 20))
def test_any_rule_as_a_loop_over_tokens(
    rule: RouterRule, num_tokens: int, has_bias: bool, has_mask: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Few values, so that many are equal, and eighths, whose sums are exact.
    logits = torch.randint(-2, 3, (num_tokens, rule.num_experts), generator=generator).double()
    bias = torch.randint(-2, 3, (rule.num_experts,), generator=generator).double() / 8 if has_bias else None
    mask = torch.rand(num_tokens, generator=generator) < 0.6 if has_mask else None
    if mask is not None:
        logits[~mask] = math.nan
    routing = choose(logits, rule, bias, mask=mask)
    assert routing.indices.is_contiguous()
    shifts = [0.0] * rule.num_experts if bias is None else bias.tolist()
    for token in range(num_tokens):
        if mask is not None and not mask[token]:
            assert routing.indices[token].tolist() == [rule.num_experts] * rule.top_k
            assert routing.weights[token].tolist() == [0.0] * rule.top_k
            continue
        experts = by_a_loop(routing.scores[token].tolist(), rule, shifts)
        assert routing.indices[token].tolist() == experts
        chosen = routing.scores[token][experts]
        if rule.score == "softmax_of_chosen":
            chosen = chosen.softmax(0)
        elif rule.renormalize:
            chosen = chosen / chosen.sum()
        torch.testing.assert_close(routing.weights[token], chosen * rule.scale)


@pytest.mark.parametrize("score", SCORES)
def test_of_equal_scores_the_lower_expert_wins(score: str) -> None:
    # More experts than a sort handles by insertion, which is stable by chance.
    routing = choose(torch.zeros(3, 200), RouterRule(200, 5, score=score))
    assert routing.indices.tolist() == [[0, 1, 2, 3, 4]] * 3
    logits = torch.zeros(1, 200)
    logits[0, 7] = 1
    assert choose(logits, RouterRule(200, 3, score=score)).indices.tolist() == [[7, 0, 1]]
    grouped = RouterRule(200, 3, score=score, num_groups=50, top_groups=2)
    assert choose(logits, grouped).indices.tolist() == [[7, 0, 1]]


def test_fp32_inside_whatever_the_tokens_are() -> None:
    router = Router(HIDDEN, RouterRule(6, 2), has_expert_bias=True)
    as_bf16 = Router(HIDDEN, RouterRule(6, 2), has_expert_bias=True).to(torch.bfloat16)
    as_bf16.load_state_dict(router.state_dict())
    router.load_state_dict(as_bf16.state_dict())
    x = drawn(5, HIDDEN).bfloat16()
    wanted = router(x.float())
    for routing in (as_bf16(x), router(x)):
        assert routing.weights.dtype == routing.logits.dtype == torch.float32
        assert torch.equal(routing.weights, wanted.weights)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(router(x).logits, wanted.logits)
    assert as_bf16.expert_bias is not None
    assert as_bf16.expert_bias.dtype == torch.float32
    assert as_bf16.counters.counts.dtype == torch.float64


@pytest.mark.parametrize("is_compiled", [False, True])
def test_gradients_of_bf16_tokens_without_a_wider_copy(is_compiled: bool) -> None:
    torch._dynamo.reset()
    results, kept = [], []
    for linear_dtype in (torch.float32, torch.float64, None):
        router = Router(HIDDEN, RouterRule(6, 2), bias=True, linear_dtype=linear_dtype).bfloat16()
        with torch.no_grad():
            router.weight.copy_(drawn(6, HIDDEN, seed=2))
            assert router.bias is not None
            router.bias.zero_()
        run = torch.compile(router, backend="aot_eager", fullgraph=True) if is_compiled else router
        x = drawn(40, HIDDEN).bfloat16().requires_grad_()
        sizes: list[tuple[torch.dtype, torch.Size]] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda kept, sizes=sizes: sizes.append((kept.dtype, kept.shape)) or kept, lambda kept: kept
        ):
            routing = run(x)
        kept += [dtype for dtype, shape in sizes if shape == x.shape]
        (routing.logits * drawn(40, 6, seed=7)).sum().backward()
        results.append([x.grad, router.weight.grad, router.bias.grad])
    assert set(kept) == {torch.bfloat16}
    for tolerance, narrow in ((1e-5, results[0]), (0.03, results[2])):
        for ours, wanted in zip(narrow, results[1], strict=True):
            assert ours.dtype == torch.bfloat16
            torch.testing.assert_close(ours, wanted, atol=tolerance, rtol=0.02)


def test_sigmoids_that_are_all_zero_give_zeros() -> None:
    routing = choose(torch.full((2, 4), -1e4), RouterRule(4, 2, score="sigmoid"))
    assert routing.weights.tolist() == [[0.0, 0.0]] * 2


def test_nan_is_an_error_but_not_in_padding() -> None:
    for rule in (
        RouterRule(4, 2),
        RouterRule(4, 1, score="sigmoid", renormalize=False, num_groups=2),
        RouterRule(4, 1, score="sigmoid", num_groups=2, group_top_scores=1),
        RouterRule(4, 2, score="softmax_of_chosen"),
    ):
        logits = drawn(3, 4)
        logits[1, 2] = math.nan
        with pytest.raises(RoutingError, match="1 of 3 tokens have nan in the scores of the experts"):
            choose(logits, rule)
        mask = torch.tensor([True, False, True])
        logits.requires_grad_()
        routing = choose(logits, rule, mask=mask)
        routing.weights.sum().backward()
        assert logits.grad is not None
        assert logits.grad.isfinite().all()
    assert choose(torch.tensor([[-math.inf, 0.0, 0.0]]), RouterRule(3, 2)).indices.tolist() == [[1, 2]]
    with pytest.raises(RoutingError, match="nan"):
        choose(torch.full((1, 3), math.inf), RouterRule(3, 2))


def test_forced_balance_gives_each_expert_as_many_tokens() -> None:
    logits = drawn(6, 4).requires_grad_()
    routing = choose(logits, RouterRule(4, 2, force_load_balancing=True))
    assert routing.indices.flatten().bincount().tolist() == [3, 3, 3, 3]
    torch.testing.assert_close(routing.weights.sum(1), torch.ones(6, dtype=torch.float64))
    routing.weights[:, 0].sum().backward()
    assert logits.grad is not None
    assert logits.grad.abs().sum() > 0


def test_weights_before_the_experts() -> None:
    x, rule = drawn(6, HIDDEN), RouterRule(4, 2, score="sigmoid", renormalize=False)
    routing = choose(drawn(6, 4, seed=1), rule)
    matrices = drawn(4, HIDDEN, HIDDEN, seed=2)
    rows, indices, weights = weights_before_experts(x, routing)
    outs = torch.relu(rows[:, None] @ matrices[indices[:, 0]])[:, 0] * weights
    for token in range(6):
        each = [
            torch.relu((x[token] * weight) @ matrices[expert])
            for weight, expert in zip(routing.weights[token], routing.indices[token], strict=True)
        ]
        torch.testing.assert_close(outs.view(6, 2, HIDDEN).sum(1)[token], sum(each))


def test_jitter_is_for_training() -> None:
    router = Router(HIDDEN, RouterRule(4, 2, input_jitter=0.3))
    x = drawn(4, HIDDEN).float()
    assert not torch.equal(router(x).logits, router(x).logits)
    router.eval()
    assert torch.equal(router(x).logits, router(x).logits)


WRONG_RULES: dict[str, tuple[dict[str, Any], str]] = {
    "k": ({"top_k": 9}, "top_k is 9, num_experts 8"),
    "zero": ({"top_k": 0}, "top_k is 0"),
    "bool": ({"top_k": True}, "top_k is True"),
    "no number": ({"num_experts": 8.0}, r"num_experts is 8\.0"),
    "score": ({"score": "tanh"}, "score is 'tanh'. Give one of softmax, sigmoid, softmax_of_chosen"),
    "scale": ({"scale": math.nan}, "scale is nan"),
    "jitter": ({"input_jitter": 1.0}, r"input_jitter is 1\.0"),
    "epsilon": ({"epsilon": -1.0}, r"epsilon is -1\.0"),
    "groups": ({"num_groups": 3}, "num_experts is 8, num_groups 3; groups have equal sizes"),
    "top groups": ({"num_groups": 2, "top_groups": 3}, "top_groups is 3 of 2 groups"),
    "no groups": ({"top_groups": 2}, "top_groups is 2 of 1 groups"),
    "few": ({"num_groups": 4, "top_k": 3}, "top_k is 3, and top_groups=1 groups have 2 experts. Give top_groups=2"),
    "small": ({"num_groups": 8, "top_groups": 4}, "group_top_scores is 2, and a group has 1 experts. Give 1 to 1"),
}


@pytest.mark.parametrize("case", WRONG_RULES)
def test_a_rule_that_cannot_be_is_refused(case: str) -> None:
    arguments, words = WRONG_RULES[case]
    with pytest.raises(RoutingError, match=f"RouterRule: {words}"):
        RouterRule(**{"num_experts": 8, "top_k": 2, **arguments})


def test_what_does_not_fit_the_rule_is_refused() -> None:
    rule, logits = RouterRule(4, 2), drawn(3, 4)
    wrong: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("logits are torch.float64 of shape", (drawn(3, 5), rule), {}),
        ("logits are torch.int64", (torch.zeros(3, 4, dtype=torch.int64), rule), {}),
        ("logits are torch.float64 of shape", (drawn(1, 3, 4), rule), {}),
        ("expert_bias has shape", (logits, rule, torch.zeros(3)), {}),
        ("mask is torch.bool", (logits, rule), {"mask": torch.ones(2, dtype=torch.bool)}),
        ("mask is torch.int64", (logits, rule), {"mask": torch.ones(3, dtype=torch.int64)}),
    ]
    for words, arguments, options in wrong:
        with pytest.raises(ShapeError, match=words):
            choose(*arguments, **options)
    with pytest.raises(ShapeError, match=rf"tokens have shape \(3, 4\), the router's weight \(4, {HIDDEN}\)"):
        Router(HIDDEN, rule)(logits)


def test_a_router_made_on_meta_begins_with_zeros() -> None:
    model = nn.Sequential(Router(HIDDEN, RouterRule(4, 2), Balance(bias_update_rate=0.1), device="meta"))
    model.to_empty(device="cpu")
    (router,) = model
    assert isinstance(router, Router)
    assert router.counters.counts.tolist() == [0.0] * len(router.counters.counts)
    assert router.counters.one.item() == 1
    assert router.counters.loss_scale.item() == 1
    assert router.expert_bias is not None
    assert router.expert_bias.tolist() == [0.0] * 4
    assert list(model.state_dict()) == ["0.weight", "0.expert_bias"]
