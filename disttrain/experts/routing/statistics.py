"""Statistics of a model's routers since they were last asked, for reports and trackers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from disttrain.errors import RoutingError
from disttrain.experts.routing.axes import summed
from disttrain.experts.routing.counters import MEANS, RouterCounters
from disttrain.mesh import DeviceMesh, axis_of_several


@dataclass(frozen=True)
class RouterStatistics:
    """The statistics of one router in training since it was last asked."""

    tokens_per_expert: tuple[int, ...]
    num_tokens: int
    """Without padding."""
    entropy: float
    """The mean over tokens of the entropy of the experts' probabilities, in nats: log(num_experts) if all are alike."""
    balance_loss: float
    """The mean over passes, by their tokens, without its coefficient; 0 where the router has none."""
    z_loss: float
    num_dropped: int
    """Choices that experts without room did not take."""

    @property
    def max_load(self) -> float:
        """The tokens of the busiest expert over the mean: 1 is even, num_experts / top_k the worst; 0 of no tokens."""
        total = sum(self.tokens_per_expert)
        return max(self.tokens_per_expert) * len(self.tokens_per_expert) / total if total else 0.0

    @property
    def load_entropy(self) -> float:
        """The entropy of the experts' loads over its largest value: 1 is even, 0 all tokens to one expert."""
        total, num_experts = sum(self.tokens_per_expert), len(self.tokens_per_expert)
        shares = [count / total for count in self.tokens_per_expert if count]
        return -sum(share * math.log(share) for share in shares) / math.log(num_experts) if num_experts > 1 else 1.0

    @property
    def num_idle(self) -> int:
        """Experts without a token."""
        return self.tokens_per_expert.count(0)

    @property
    def dropped_share(self) -> float:
        """Dropped choices over all."""
        total = sum(self.tokens_per_expert)
        return self.num_dropped / total if total else 0.0


@torch.no_grad()
def read_statistics(module: nn.Module, axis: DeviceMesh | None = None) -> dict[str, RouterStatistics]:
    """Returns what the routers within `module` have counted since the last reading, by the routers' names.

    It waits for the device, once for all routers. Steps that are not to be waited for: read each few steps.

    Args:    axis  the ranks whose tokens are counted together, a mesh of one axis; None: this rank alone.
    Raises:  RoutingError where tokens had nan in their scores, naming the routers; with an axis on all its ranks.
    Collective: with an axis, every rank, one all-reduce.
    """
    axis = axis_of_several("read_statistics", axis)
    named = {name.rpartition(".")[0]: each for name, each in module.named_modules() if isinstance(each, RouterCounters)}
    if not named:
        return {}
    numbers: list[float] = summed(torch.cat([each.since_read() for each in named.values()]), axis).tolist()
    statistics, bad = {}, []
    for name, each in named.items():
        of_router, numbers = numbers[: len(each.counts)], numbers[len(each.counts) :]
        statistics[name] = _statistics(of_router, each.num_experts, each.top_k)
        if math.isnan(statistics[name].entropy):
            bad.append(name or "the router")
    if bad:
        more = f", and of {len(bad) - 1} more routers" if len(bad) > 1 else ""
        remedy = "Look for what gave it, before the router; padding is left out by `mask`."
        rank = None if axis is None else axis.get_rank()
        raise RoutingError("read_statistics", f"tokens had nan in the scores of {bad[0]}{more}.", remedy, rank=rank)
    return statistics


def _statistics(numbers: list[float], num_experts: int, top_k: int) -> RouterStatistics:
    choices, padding, others = numbers[:num_experts], numbers[num_experts], numbers[num_experts + 1 :]
    num_tokens, num_rows = sum(choices) / top_k, (sum(choices) + padding) / top_k
    entropy, balance_loss, z_loss = others[: len(MEANS)]
    return RouterStatistics(
        tuple(map(int, choices)),
        int(num_tokens),
        # The mean over all experts and tokens has been counted, padding as zeros.
        entropy * num_experts / max(1.0, num_tokens),
        balance_loss / max(1.0, num_rows),
        z_loss / max(1.0, num_rows),
        int(others[-1]),
    )


def expert_numbers(statistics: Mapping[str, RouterStatistics]) -> dict[str, float]:
    """Returns the numbers of all routers together for `disttrain.report(**numbers)`; empty where none had a token.

    Loads are those of the worst router, all else means over routers or sums.
    """
    all_of = [each for each in statistics.values() if each.num_tokens]
    if not all_of:
        return {}
    return {
        "experts/max_load": max(each.max_load for each in all_of),
        "experts/load_entropy": min(each.load_entropy for each in all_of),
        "experts/idle": float(sum(each.num_idle for each in all_of)),
        "experts/dropped_share": max(each.dropped_share for each in all_of),
        "experts/entropy": sum(each.entropy for each in all_of) / len(all_of),
        "experts/balance_loss": sum(each.balance_loss for each in all_of) / len(all_of),
        "experts/z_loss": sum(each.z_loss for each in all_of) / len(all_of),
    }


def router_numbers(statistics: Mapping[str, RouterStatistics], *, has_experts: bool = False) -> dict[str, float]:
    """Returns the numbers of each router for `Tracking.write(step, numbers)`, under names that trackers show in groups.

    They are too many for a report. With `has_experts` there is each expert's share of the choices, times the number of
    experts, too.
    """
    numbers: dict[str, float] = {}
    for name, each in statistics.items():
        values = {
            "max_load": each.max_load,
            "load_entropy": each.load_entropy,
            "idle": float(each.num_idle),
            "dropped_share": each.dropped_share,
            "entropy": each.entropy,
            "balance_loss": each.balance_loss,
            "z_loss": each.z_loss,
        }
        numbers |= {f"experts {key}/{name or 'router'}": value for key, value in values.items()}
        if has_experts:
            total = max(1, sum(each.tokens_per_expert))
            size = len(each.tokens_per_expert)
            numbers |= {
                f"experts load {name or 'router'}/{expert}": count * size / total
                for expert, count in enumerate(each.tokens_per_expert)
            }
    return numbers
