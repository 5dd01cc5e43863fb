"""Balance without a loss: each step an expert's bias goes up where it had too few tokens, down where too many.

The rule of DeepSeek-V3 (arXiv:2412.19437), from "Auxiliary-Loss-Free Load Balancing" (arXiv:2408.15664).
"""

from __future__ import annotations

import torch
from torch import nn

from disttrain.experts.routing.axes import summed
from disttrain.experts.routing.watch import RouterWatch
from disttrain.mesh import DeviceMesh, axis_of_several


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
    axis = axis_of_several("update_expert_biases", axis)
    by_axis: dict[DeviceMesh | None, list[tuple[torch.Tensor, RouterWatch]]] = {}
    for router in module.modules():
        watch, bias = router._modules.get("counters"), _bias_of(router)
        if isinstance(watch, RouterWatch) and watch.balance.bias_update_rate and bias is not None:
            by_axis.setdefault(watch.batch_axis if axis is None else axis, []).append((bias, watch))
    for shared, routers in by_axis.items():
        counts = summed(torch.cat([watch.since_update() for _, watch in routers]), shared)
        sizes = [watch.num_experts for _, watch in routers]
        for (bias, watch), load in zip(routers, counts.split(sizes), strict=True):
            update_expert_bias(bias, load, watch.balance.bias_update_rate, is_centered=is_centered)


def _bias_of(router: nn.Module) -> torch.Tensor | None:
    """Ours, or that of transformers' routers."""
    bias = getattr(router, "expert_bias", None)
    return bias if bias is not None else getattr(router, "e_score_correction_bias", None)
