"""Routers of transformers, watched: what is counted, their losses and their biases."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from disttrain.errors import RoutingError
from disttrain.experts import Balance, read_statistics, update_expert_biases, watch_routers
from tests.cases.kernels import drawn
from tests.cases.routing import HIDDEN, ROUTERS, drawn_router


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_of_transformers_are_found_and_counted(name: str) -> None:
    theirs, rule = drawn_router(name)
    model = nn.ModuleDict({"gate": theirs, "other": nn.Linear(HIDDEN, 3)})
    keys = list(model.state_dict())
    assert watch_routers(model) == ("gate",)
    assert watch_routers(model) == ()
    assert list(model.state_dict()) == keys
    watched = theirs.counters.rule
    assert (watched.num_experts, watched.top_k) == (rule.num_experts, rule.top_k)
    assert watched.score == ("sigmoid" if rule.score == "sigmoid" else "softmax")
    logits, weights, indices = theirs(drawn(11, HIDDEN).float())
    told = read_statistics(model)["gate"]
    assert told.tokens_per_expert == tuple(indices.flatten().bincount(minlength=rule.num_experts).tolist())
    shares = logits.sigmoid() if rule.score == "sigmoid" else logits.softmax(1)
    entropy = torch.special.entr(shares / shares.sum(1, keepdim=True)).sum(1).mean()
    assert told.entropy == pytest.approx(entropy.item(), rel=1e-5)
    theirs.eval()
    again = theirs(drawn(11, HIDDEN).float())
    assert torch.equal(again[1], weights)
    assert read_statistics(model)["gate"].num_tokens == 0


def test_scores_that_are_neither_are_left() -> None:
    class Odd(nn.Module):
        def __init__(self, *, gives_two: bool) -> None:
            super().__init__()
            self.top_k, self.gives_two = 2, gives_two
            self.weight = nn.Parameter(torch.zeros(4, HIDDEN))

        def forward(self, x: torch.Tensor) -> Any:
            logits = x @ self.weight.T
            weights, indices = nn.functional.softplus(logits).topk(2)
            return (logits, indices) if self.gives_two else (logits, weights, indices)

    assert watch_routers(nn.ModuleList([Odd(gives_two=False), Odd(gives_two=True)])) == ()
    with pytest.raises(RoutingError, match="the balance is over sequences"):
        watch_routers(nn.Linear(1, 1), Balance(over="sequence"))


def mixtral() -> Any:
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=32,
        hidden_size=HIDDEN,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        router_aux_loss_coef=0.5,
    )
    return transformers.MixtralForCausalLM(config)


def test_a_models_gradients_are_those_with_its_own_balance_loss() -> None:
    tokens = torch.arange(18).view(2, 9) % 32
    theirs, ours = mixtral(), mixtral()
    wanted = theirs(tokens, labels=tokens, output_router_logits=True)
    wanted.loss.backward()
    (name,) = watch_routers(ours, Balance(aux_loss_coeff=0.5, is_per_choice=False))
    ours(tokens, labels=tokens).loss.backward()
    for (key, parameter), other in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad, msg=key)
    assert read_statistics(ours)[name].balance_loss == pytest.approx(wanted.aux_loss.item(), rel=1e-5)


def test_the_bias_of_deepseeks_routers_is_updated() -> None:
    theirs, _ = drawn_router("deepseek_v3")
    model = nn.Sequential(theirs)
    watch_routers(model, Balance(bias_update_rate=0.25))
    before = theirs.e_score_correction_bias.clone()
    _, _, indices = model(drawn(11, HIDDEN).float())
    update_expert_biases(model)
    load = indices.flatten().bincount(minlength=8).double()
    torch.testing.assert_close(theirs.e_score_correction_bias, before + 0.25 * (load.mean() - load).sign().float())
