"""Layers of experts: the experts alone, and with their router and the experts that all tokens share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from disttrain.dtensor import Placement, Replicate, Shard, StridedShard
from disttrain.errors import ShapeError
from disttrain.experts.crossing import GatedExperts
from disttrain.experts.expert_layer import (
    ExpertLayer,
    crossing_part,
    float8_sizes,
    local_part,
    local_share,
    without_experts,
)
from disttrain.experts.graphs import out_of_graphs
from disttrain.experts.hidden_cut import hidden_placements
from disttrain.experts.routing.router import Router
from disttrain.kernels.grouped.form import GatedForm
from disttrain.kernels.grouped.mlp import ExpertWeights
from disttrain.kernels.grouped.products import expert_mlp, mix_experts
from disttrain.kernels.grouped.rows import ExpertOrder


class Experts(ExpertLayer):
    """Gated experts whose weights lie one behind the other, with the parameter names of transformers.

    Parameters: gate_up_proj  (experts, 2 H, D);  down_proj  (experts, D, H);  transposed as `form` says.
                gate_up_proj_bias, down_proj_bias  (experts, 2 H) and (experts, D), with `bias`.

    After `shard_experts` the parameters are DTensors, of which a rank has some experts, and each token's row goes to
    the ranks of its experts and back.
    """

    num_experts: int
    form: GatedForm
    gate_up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        form: GatedForm | None = None,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if min(num_experts, hidden_size, intermediate_size) < 1:
            problem = f"there are {num_experts} experts of {hidden_size} x {intermediate_size}."
            raise ShapeError("Experts", problem, "Give one at least, and sizes from 1.")
        self.num_experts = num_experts
        self.form = form = form or GatedForm()
        gate_up, down = (2 * intermediate_size, hidden_size), (hidden_size, intermediate_size)
        if form.is_transposed:
            gate_up, down = gate_up[::-1], down[::-1]
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, *gate_up, **options))
        self.down_proj = nn.Parameter(torch.empty(num_experts, *down, **options))
        if bias:
            self.gate_up_proj_bias = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, **options))
            self.down_proj_bias = nn.Parameter(torch.empty(num_experts, hidden_size, **options))
        else:
            self.gate_up_proj_bias = self.down_proj_bias = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw each expert's weights as nn.Linear draws its own."""
        columns = 1 if self.form.is_transposed else 2
        for weight, bias in (
            (self.gate_up_proj, self.gate_up_proj_bias),
            (self.down_proj, self.down_proj_bias),
        ):
            bound = 1 / math.sqrt(weight.shape[columns])
            nn.init.uniform_(weight, -bound, bound)
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)

    def forward(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """
        Args:    x  (tokens, D);  indices, weights  (tokens, k), of each token's experts.
        Returns: (tokens, D), the sum of what a token's experts compute, by their weights.
        Raises:  ShapeError when shapes or dtypes don't fit, or, with other ranks, weights are not finite.
        Collective: every rank of the axis that the experts lie along, and again in backward.
        """
        return self.mix(x, indices, weights)

    def count_experts(self) -> int:
        """The experts of all ranks."""
        return self.num_experts

    def expert_width(self) -> int:
        """The columns of the rows that experts take."""
        return self.down_proj.shape[2 if self.form.is_transposed else 1]

    def expert_dtype(self) -> torch.dtype:
        """That of the rows that experts take."""
        return self.down_proj.dtype

    def float8_obstacle(self) -> str:
        """Why products cannot be in float8; empty where they can."""
        return float8_sizes(*self.gate_up_proj.shape[1:], *self.down_proj.shape[1:])

    def hidden_cuts(self) -> Sequence[Placement]:
        """The cut of each of `expert_tensors` along the hidden dim of experts."""
        form = self.form
        into, back = hidden_placements(
            is_transposed=form.is_transposed, is_interleaved=form.is_interleaved, is_fused=True
        )
        into_bias = Shard(1) if form.is_interleaved else StridedShard(1, 2)
        of_name = {
            "gate_up_proj": into,
            "down_proj": back,
            "gate_up_proj_bias": into_bias,
            "down_proj_bias": Replicate(),
        }
        return [of_name[name] for _, name, _ in self.expert_tensors()]

    def compute(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """This rank's experts on rows that are sorted by them."""
        gate_up, down, gate_up_bias, down_bias = self._parts()
        if not len(ends):
            return without_experts(rows, (gate_up, down, gate_up_bias, down_bias))
        biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
        return expert_mlp(rows, ends, gate_up, down, self.form, **biases, float8=self.float8)

    def gated_experts(self) -> GatedExperts | None:
        """This rank's experts; None where it has none."""
        if not self.count_experts_here():
            return None
        gate_up_bias, down_bias = self.gate_up_proj_bias, self.down_proj_bias
        weights = ExpertWeights(
            crossing_part(self.gate_up_proj),
            None,
            crossing_part(self.down_proj),
            None if gate_up_bias is None else crossing_part(gate_up_bias),
            None if down_bias is None else local_share(down_bias, self),
        )
        return GatedExperts(weights, self.form, self.float8)

    def mix_here(self, x: torch.Tensor, order: ExpertOrder, weights: torch.Tensor) -> torch.Tensor:
        """The forward where all experts are here."""
        gate_up, down, gate_up_bias, down_bias = self._parts()
        biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
        return mix_experts(x, order, weights, gate_up, down, self.form, **biases, float8=self.float8)

    def _parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """This rank's experts' weights and biases, through which their gradients go."""
        gate_up_bias, down_bias = self.gate_up_proj_bias, self.down_proj_bias
        return (
            local_part(self.gate_up_proj),
            local_part(self.down_proj),
            None if gate_up_bias is None else local_part(gate_up_bias),
            None if down_bias is None else local_share(down_bias, self),
        )

    def extra_repr(self) -> str:
        gate_up = self.gate_up_proj.shape
        return f"{self.num_experts}, gate_up_proj={tuple(gate_up)}, {self.form}"


class MixtureOfExperts(nn.Module):
    """A router, its experts, and perhaps experts that all tokens share, which compute while rows are under way.

    Args: router  gives the tokens' `weights` and `indices` (tokens, k), as fields, or behind its logits in a tuple of
                  three, as transformers' routers do;  experts, shared_experts  what they choose from, and what all
                  tokens go through.
    Raises: ShapeError for a router of other experts, here or, of one that is not ours, in its first forward.
    """

    def __init__(self, router: nn.Module, experts: Experts, shared_experts: nn.Module | None = None) -> None:
        super().__init__()
        if isinstance(router, Router):
            _check_router(router.rule.num_experts, experts)
            if router.hidden_size != experts.expert_width():
                problem = f"the router takes tokens of {router.hidden_size}, experts of {experts.expert_width()}."
                raise ShapeError("MixtureOfExperts", problem, "Give both one hidden size.")
        self.router = router
        self.experts = experts
        self.shared_experts = shared_experts

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """
        Args:    x     (..., D).
                 mask  (...), False of padding, which goes to no expert; for a `Router`, which takes one.
        Returns: (..., D).
        Collective: as `Experts`.
        """
        # Losses over sequences ask for the dims of `x`; a router of ours refuses what has none.
        is_ours = isinstance(self.router, Router)
        routing: Any = self.router(x, mask) if is_ours else None
        tokens = x.reshape(-1, x.shape[-1])
        if not is_ours:
            routing = self.router(tokens) if mask is None else self.router(tokens, mask)
        if hasattr(routing, "indices"):
            weights, indices = routing.weights, routing.indices
        else:
            logits, weights, indices = routing
            if logits is not None:
                _check_router(logits.shape[-1], self.experts)
        experts, shared_experts = self.experts, self.shared_experts
        if shared_experts is None or experts.exchange is None:
            out: torch.Tensor = experts(tokens, indices, weights).view(x.shape)
            if shared_experts is not None:
                out = out + shared_experts(x)
        else:
            out = _beside_shared(experts, shared_experts, x, indices, weights)
        counters: Any = getattr(self.router, "counters", None)
        if counters is not None and self.training and experts.num_dropped is not None:
            counters.add_dropped(experts.num_dropped)
        return out


def _check_router(num_experts: int, experts: Experts) -> None:
    if num_experts != experts.count_experts():
        problem = f"the router chooses among {num_experts} experts, and there are {experts.count_experts()}."
        raise ShapeError("MixtureOfExperts", problem, "Give both one number of experts.")


@out_of_graphs
def _beside_shared(
    experts: Experts, shared_experts: nn.Module, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    sending = experts.begin(x.reshape(-1, x.shape[-1]), indices, weights, beside=True)
    if not sending.is_beside:
        sending.send()
    shared: torch.Tensor = shared_experts(x)
    if sending.is_beside:
        # The GPU computes the shared experts while the host waits for the sizes.
        sending.send()
    mixed: torch.Tensor = experts.finish(sending).view(x.shape) + shared
    return mixed
