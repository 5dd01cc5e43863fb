"""The module that routes: logits of each token, its experts, the losses that keep loads even, and what is counted."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from disttrain.autocast import is_within_autocast
from disttrain.errors import ShapeError
from disttrain.experts.routing.axes import checked_axis
from disttrain.experts.routing.balance import Balance, balance_of, token_sums, with_loss, z_of
from disttrain.experts.routing.choice import Routing, choose, probabilities, tell
from disttrain.experts.routing.counters import SUMS, KeepsDtypes, RouterCounters
from disttrain.experts.routing.rule import RouterRule
from disttrain.mesh import DeviceMesh


class Router(KeepsDtypes):
    """Chooses experts for tokens by a linear layer and a rule.

    Its parameters and buffer: weight (num_experts, hidden_size), bias (num_experts,), expert_bias (num_experts,) fp32,
    which keeps its dtype when the module is cast. In training, and then only, it takes losses and counts: the gradient
    of the losses comes with the weights', so that nothing has to be added to the model's loss.

    Args: hidden_size   of the tokens.
          rule          see `RouterRule`.
          balance       see `Balance`; None: no losses, and no expert_bias.
          bias          add a trained bias to the logits (gpt-oss).
          has_expert_bias  have the buffer, also where the balance does not update it: a trained model's is loaded.
          batch_axis    the ranks among which the batch is cut, a mesh of one axis: for losses over the whole batch, and
                        the update of expert_bias.
          expert_axis   the ranks among which the experts are, which wait for each other behind the router: they raise
                        errors together.
          linear_dtype  of the product; None: the tokens'. fp64 of fp64 in any case.
          device, dtype  of the parameters.
    Raises: RoutingError for arguments that make no sense.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    expert_bias: torch.Tensor | None
    loss_scale: torch.Tensor

    def __init__(
        self,
        hidden_size: int,
        rule: RouterRule,
        balance: Balance | None = None,
        *,
        bias: bool = False,
        has_expert_bias: bool = False,
        batch_axis: DeviceMesh | None = None,
        expert_axis: DeviceMesh | None = None,
        linear_dtype: torch.dtype | None = torch.float32,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.rule = rule
        self.balance = balance or Balance()
        self.batch_axis = checked_axis("Router", batch_axis)
        self.expert_axis = checked_axis("Router", expert_axis)
        self.linear_dtype = linear_dtype
        self.weight = nn.Parameter(torch.empty(rule.num_experts, hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(rule.num_experts, device=device, dtype=dtype)) if bias else None
        has_buffer = has_expert_bias or self.balance.bias_update_rate > 0
        self.register_buffer("expert_bias", torch.zeros(rule.num_experts, device=device) if has_buffer else None)
        self.register_buffer("loss_scale", torch.ones((), device=device), persistent=False)
        self.counters = RouterCounters(rule.num_experts, device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the parameters as nn.Linear does, and sets expert_bias to zero."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.hidden_size)
            nn.init.uniform_(self.bias, -bound, bound)
        if self.expert_bias is not None:
            nn.init.zeros_(self.expert_bias)

    def reset_buffer(self, name: str) -> None:
        """See `KeepsDtypes`."""
        self.get_buffer(name).fill_(1.0 if name == "loss_scale" else 0.0)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Routing:
        """Routes tokens.

        Args:    x     (..., hidden_size); for losses over sequences (sequences, tokens, hidden_size).
                 mask  x's shape without its last dim, bool: False of padding, which goes to no expert, has no loss and
                       is not counted.
        Raises:  ShapeError for another width, RoutingError as `choose`; then the ranks of expert_axis raise, too.
        Collective: as `choose` over expert_axis; in training with losses over the batch, an all-reduce over batch_axis.
        """
        if x.dim() == 0 or x.shape[-1] != self.hidden_size:
            problem = f"tokens have shape {tuple(x.shape)}, the router's weight {tuple(self.weight.shape)}."
            error = ShapeError("Router", problem, f"Give a last dim of {self.hidden_size}.")
            tell(error, self.expert_axis)
            raise error
        mask = None if mask is None else mask.reshape(-1)
        logits = self._logits(x.reshape(-1, self.hidden_size))
        routing = choose(logits, self.rule, self.expert_bias, mask=mask, axis=self.expert_axis)
        return self._with_losses(routing, x, mask) if self.training else routing

    def extra_repr(self) -> str:
        """The rule and the balance."""
        return f"{self.hidden_size}, {self.rule}, {self.balance}"

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        jitter = self.rule.input_jitter
        if jitter and self.training:
            x = x * torch.empty_like(x).uniform_(1 - jitter, 1 + jitter)
        dtype = torch.promote_types(self.linear_dtype or x.dtype, x.dtype)
        off = torch.autocast(x.device.type, enabled=False) if is_within_autocast(x.device) else nullcontext()
        with off:
            return F.linear(x.to(dtype), self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))

    def _with_losses(self, routing: Routing, x: torch.Tensor, mask: torch.Tensor | None) -> Routing:
        balance = self.balance
        losses = [routing.scores.new_zeros(())] * 2
        if balance.has_losses:
            sums = token_sums(
                routing,
                self.rule,
                mask=mask,
                num_sequences=self._num_sequences(x),
                axis=self.batch_axis if balance.over == "batch" else None,
                counts_by_score=balance.counts_by_score,
            )
            losses = [balance_of(sums, self.rule, is_per_choice=balance.is_per_choice), z_of(sums)]
            loss = balance.aux_loss_coeff * losses[0] + balance.z_loss_coeff * losses[1]
            routing = routing._replace(weights=with_loss(routing.weights, loss, self.loss_scale))
        self._count(routing, losses, mask)
        return routing

    @torch.no_grad()
    def _count(self, routing: Routing, losses: list[torch.Tensor], mask: torch.Tensor | None) -> None:
        entropy = torch.special.entr(probabilities(routing, self.rule)).sum(1)
        counted = torch.ones_like(entropy) if mask is None else mask.to(entropy.dtype)
        sums = {
            "passes": entropy.new_ones(()),
            "tokens": counted.sum(),
            "entropy": (entropy.nan_to_num() * counted).sum(),
            "balance_loss": losses[0].nan_to_num(),
            "z_loss": losses[1].nan_to_num(),
            "nan": routing.weights.isnan().any(1).sum(),
            "dropped": entropy.new_zeros(()),
        }
        self.counters.add(routing.indices, torch.stack([sums[name].double() for name in SUMS]))

    def _num_sequences(self, x: torch.Tensor) -> int:
        if self.balance.over != "sequence":
            return 1
        if x.dim() != 3:
            problem = f"losses are taken over sequences, and tokens have shape {tuple(x.shape)}."
            raise ShapeError("Router", problem, "Give (sequences, tokens, hidden_size).")
        return max(1, x.shape[0])


@torch.no_grad()
def set_loss_scale(module: nn.Module, scale: float | torch.Tensor) -> None:
    """Multiplies the routers' losses within `module` by `scale` from now on, as the model's own loss is multiplied.

    For n microbatches whose losses are divided by n, 1 / n; with a GradScaler, its scale: a tensor is copied on the
    device. A captured step takes on the new value.
    """
    for each in module.modules():
        if isinstance(each, Router):
            each.loss_scale.fill_(scale)
