"""The module that routes: logits of each token, its experts, the losses that keep loads even, and what is counted."""

from __future__ import annotations

import math

import torch
from torch import nn

from disttrain.errors import ShapeError
from disttrain.experts.routing.balance import Balance
from disttrain.experts.routing.choice import Routing, choose, tell
from disttrain.experts.routing.counters import KeepsDtypes
from disttrain.experts.routing.logits import logits_of
from disttrain.experts.routing.rule import RouterRule
from disttrain.experts.routing.watch import RouterWatch
from disttrain.mesh import DeviceMesh, axis_of_several


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
        balance = balance or Balance()
        self.expert_axis = axis_of_several("Router", expert_axis)
        self.linear_dtype = linear_dtype
        self.weight = nn.Parameter(torch.empty(rule.num_experts, hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(rule.num_experts, device=device, dtype=dtype)) if bias else None
        has_buffer = has_expert_bias or balance.bias_update_rate > 0
        self.register_buffer("expert_bias", torch.zeros(rule.num_experts, device=device) if has_buffer else None)
        self.counters = RouterWatch(rule, balance, batch_axis, device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the parameters as nn.Linear does, and has the buffers begin anew."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.hidden_size)
            nn.init.uniform_(self.bias, -bound, bound)
        if self.expert_bias is not None:
            nn.init.zeros_(self.expert_bias)
        self.counters.reset_buffers()

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
        if not self.training:
            return routing
        # Not by `_replace`, which Dynamo does not return from a graph (torch 2.11).
        return Routing(self.counters.take(routing, mask, self._num_sequences(x)), *routing[1:])

    def extra_repr(self) -> str:
        """The rule and the balance."""
        return f"{self.hidden_size}, {self.rule}, {self.counters.balance}"

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        jitter = self.rule.input_jitter
        if jitter and self.training:
            x = x * torch.empty_like(x).uniform_(1 - jitter, 1 + jitter)
        return logits_of(x, self.weight, self.bias, self.linear_dtype)

    def _num_sequences(self, x: torch.Tensor) -> int:
        if self.counters.balance.over != "sequence":
            return 1
        if x.dim() != 3:
            problem = f"losses are taken over sequences, and tokens have shape {tuple(x.shape)}."
            raise ShapeError("Router", problem, "Give (sequences, tokens, hidden_size).")
        return max(1, x.shape[0])
