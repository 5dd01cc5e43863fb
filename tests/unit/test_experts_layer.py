"""A layer with a router of ours: losses over sequences, and padding."""

from __future__ import annotations

import torch

from disttrain.experts import Balance, Experts, MixtureOfExperts, Router, RouterRule


def layer(**balance: object) -> MixtureOfExperts:
    torch.manual_seed(0)
    rule = RouterRule(4, 2)
    return MixtureOfExperts(Router(8, rule, Balance(**balance)), Experts(4, 8, 6))  # type: ignore[arg-type]


def test_losses_over_sequences_see_sequences() -> None:
    x = torch.randn(3, 5, 8)
    grads = []
    for coefficient in (0.0, 1.0):
        moe = layer(aux_loss_coeff=coefficient, over="sequence")
        moe(x).sum().backward()
        grads.append(moe.router.weight.grad)
    assert not torch.equal(*grads)


def test_padding_goes_to_no_expert() -> None:
    x = torch.randn(2, 4, 8)
    mask = torch.tensor([[True, True, False, True], [True, False, False, False]])
    moe = layer()
    result = moe(x, mask)
    assert not result[~mask].any()
    torch.testing.assert_close(result[mask], layer()(x[mask]))


def test_a_router_of_another_form_takes_tokens() -> None:
    class Other(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            assert x.dim() == 2
            return x, torch.ones(len(x), 1), torch.zeros(len(x), 1, dtype=torch.int64)

    moe = MixtureOfExperts(Other(), Experts(4, 8, 6))
    assert moe(torch.randn(2, 3, 8)).shape == (2, 3, 8)
