"""Balance without a loss: each step an expert's bias goes up where it had too few tokens, down where too many.

The rule of DeepSeek-V3 (arXiv:2412.19437), from "Auxiliary-Loss-Free Load Balancing" (arXiv:2408.15664).
"""

from __future__ import annotations

import torch
from torch import nn

from disttrain.experts.routing.axes import checked_axis, summed
from disttrain.experts.routing.router import Router
from disttrain.mesh import DeviceMesh


@torch.no_grad()
def update_expert_bias(
    expert_bias: torch.Tensor, tokens_per_expert: torch.Tensor, rate: float, *, is_centered: bool = False
) -> None:
    """Adds `rate` times the sign of (mean load - load) to each expert's bias, in place.

    Args: expert_bias        (experts,), floats.
          tokens_per_expert  (experts,), of all ranks together.
          is_centered        take away the mean of what is added, as torchtitan does.
    """
    load = tokens_per_expert.double()
    step = rate * (load.mean() - load).sign()
    expert_bias.add_((step - step.mean() if is_centered else step).to(expert_bias.dtype))


@torch.no_grad()
def update_expert_biases(module: nn.Module, axis: DeviceMesh | None = None, *, is_centered: bool = False) -> None:
    """Updates the bias of each router within `module` by the tokens since the last update; call it once a step.

    Steps of several microbatches count all of them. Nothing is asked of the host, so that it may be captured:
    `optimizer.register_step_post_hook(lambda *_: update_expert_biases(model))`.

    Args: axis  the ranks of which tokens are counted together, a mesh of one axis; None: each router's batch_axis.
    Collective: every rank of the axis, one all-reduce; none where no router has a rate.
    """
    axis = checked_axis("update_expert_biases", axis)
    by_axis: dict[DeviceMesh | None, list[Router]] = {}
    for each in module.modules():
        if isinstance(each, Router) and each.balance.bias_update_rate:
            by_axis.setdefault(each.batch_axis if axis is None else axis, []).append(each)
    for shared, routers in by_axis.items():
        counts = summed(torch.cat([each.counters.since_update() for each in routers]), shared)
        sizes = [each.rule.num_experts for each in routers]
        for each, load in zip(routers, counts.split(sizes), strict=True):
            assert each.expert_bias is not None
            update_expert_bias(each.expert_bias, load, each.balance.bias_update_rate, is_centered=is_centered)
