"""Watches each routing in training: takes losses of it, and counts it."""

from __future__ import annotations

import torch
from torch import nn

from disttrain.experts.routing.balance import Balance, balance_of, token_sums, with_loss, z_of
from disttrain.experts.routing.choice import Routing, probabilities
from disttrain.experts.routing.counters import RouterCounters
from disttrain.experts.routing.rule import RouterRule
from disttrain.mesh import DeviceMesh, axis_of_several


class RouterWatch(RouterCounters):
    """Takes the losses of one router's choices, and counts these.

    Args: rule  of the router, of which num_experts, top_k, score and epsilon are asked;  balance, batch_axis  as in
          `Router`.
    """

    loss_scale: torch.Tensor

    def __init__(
        self,
        rule: RouterRule,
        balance: Balance,
        batch_axis: DeviceMesh | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(rule.num_experts, rule.top_k, device)
        self.rule = rule
        self.balance = balance
        self.batch_axis = axis_of_several("Router", batch_axis)
        self.register_buffer("loss_scale", torch.ones((), device=device), persistent=False)

    def reset_buffer(self, name: str) -> None:
        """See `KeepsDtypes`."""
        if name == "loss_scale":
            self.loss_scale.fill_(1.0)
        else:
            super().reset_buffer(name)

    def take(self, routing: Routing, mask: torch.Tensor | None = None, num_sequences: int = 1) -> torch.Tensor:
        """Returns the weights, with the losses in their backward pass.

        Args:       mask  (tokens,) bool, False of padding;  num_sequences  of equal length.
        Collective: with losses over the batch, one all-reduce over batch_axis.
        """
        balance, weights = self.balance, routing.weights
        shares, losses = probabilities(routing, self.rule), []
        if balance.has_losses:
            sums = token_sums(
                routing,
                self.rule,
                shares,
                mask=mask,
                num_sequences=num_sequences,
                axis=self.batch_axis if balance.over == "batch" else None,
                counts_by_score=balance.counts_by_score,
            )
            losses = [balance_of(sums, self.rule, is_per_choice=balance.is_per_choice), z_of(sums)]
            loss = balance.aux_loss_coeff * losses[0] + balance.z_loss_coeff * losses[1]
            weights = with_loss(weights, loss, self.loss_scale)
        has_grad = torch.is_grad_enabled()
        with torch.no_grad():
            # What follows the host must do for each layer: as few launches as it takes.
            shares = shares if mask is None else shares.masked_fill(~mask[:, None], 0)
            self.add(routing.indices, torch.stack([torch.special.entr(shares).mean(), *losses]), has_grad)
        return weights


@torch.no_grad()
def set_loss_scale(module: nn.Module, scale: float | torch.Tensor) -> None:
    """Multiplies the routers' losses within `module` by `scale` from now on, as the model's own loss is multiplied.

    For n microbatches whose losses are divided by n, 1 / n; with a GradScaler, its scale: a tensor is copied on the
    device. A captured step takes on the new value.
    """
    for each in module.modules():
        if isinstance(each, RouterWatch):
            each.loss_scale.fill_(scale)
