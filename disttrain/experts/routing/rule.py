"""The rule by which a router chooses experts, as a value.

Its options under the names of others:

    here                  transformers            torchtitan                 Megatron-Core (moe_router_...)
    score                 scoring_func            score_func                 score_function
    renormalize           norm_topk_prob          route_norm                 always for sigmoid
    scale                 routed_scaling_factor   route_scale                topk_scaling_factor
    num_groups            n_group                 num_expert_groups          num_groups
    top_groups            topk_group              num_limited_groups         group_topk
    group_top_scores      2; DeepSeek-V2: 1       2                          topk // group_topk
    force_load_balancing  -                       _debug_force_load_balance  force_load_balancing
    input_jitter          router_jitter_noise     -                          moe_input_jitter_eps

Megatron's softmax is softmax_of_chosen here; with pre_softmax, it is softmax without renormalize. torchtitan's
score_before_experts is `weights_before_experts`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from disttrain.errors import RoutingError

SCORES = ("softmax", "sigmoid", "softmax_of_chosen")


@dataclass(frozen=True)
class RouterRule:
    """The rule by which a token's scores come from its logits, and its experts and their weights from the scores.

    Args: num_experts    of the layer, on all ranks together.
          top_k          experts of a token.
          score          softmax over all experts (Mixtral, Qwen3-MoE), sigmoid of each (DeepSeek-V3), or
                         softmax_of_chosen: the largest logits win, and softmax is taken over these alone (gpt-oss).
          renormalize    a token's weights are divided by their sum plus `epsilon`.
          epsilon        so that scores that are all zero give weights of zero.
          scale          what weights are multiplied by in the end.
          num_groups     groups of neighbouring experts, of equal size.
          top_groups     groups that a token's experts may come from: those of the largest sums of their
                         `group_top_scores` best scores: 2 is DeepSeek-V3's rule; 1, the largest score, DeepSeek-V2's.
          input_jitter   in training the router's input is multiplied by numbers drawn from 1 - input_jitter to
                         1 + input_jitter.
          force_load_balancing  experts take turns, whatever the scores are, which only give the weights: for
                         benchmarks.

    Of equal scores, the expert of the lower number wins; of equal groups, the lower one. The result depends on nothing
    but the scores, so that ranks with equal scores choose alike.

    Raises: RoutingError for a rule that cannot be.
    """

    num_experts: int
    top_k: int
    score: str = "softmax"
    renormalize: bool = True
    epsilon: float = 1e-20
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_top_scores: int = 2
    input_jitter: float = 0.0
    force_load_balancing: bool = False

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.top_k > self.num_experts:
            raise _error(
                f"top_k is {self.top_k}, num_experts {self.num_experts}; a token has each expert once.",
                "Choose fewer, or have more experts.",
            )
        if self.score not in SCORES:
            raise _error(f"score is {self.score!r}.", f"Give one of {', '.join(SCORES)}.")
        if self.top_groups > self.num_groups:
            raise _error(
                f"top_groups is {self.top_groups} of {self.num_groups} groups.", f"Give 1 to {self.num_groups}."
            )
        if self.num_groups > 1:
            self._check_groups()

    @property
    def group_size(self) -> int:
        """Experts of a group."""
        return self.num_experts // self.num_groups

    def _check_numbers(self) -> None:
        for name in ("num_experts", "top_k", "num_groups", "top_groups", "group_top_scores"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise _error(f"{name} is {value!r}.", "Give a whole number from 1.")
        for name in ("scale", "epsilon", "input_jitter"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
                raise _error(f"{name} is {value!r}.", "Give a finite number.")
        if self.epsilon < 0:
            raise _error(f"epsilon is {self.epsilon}.", "Give 0 or a small positive number.")
        if not 0 <= self.input_jitter < 1:
            raise _error(f"input_jitter is {self.input_jitter}.", "Give a number from 0, below 1.")

    def _check_groups(self) -> None:
        if self.num_experts % self.num_groups:
            raise _error(
                f"num_experts is {self.num_experts}, num_groups {self.num_groups}; groups have equal sizes.",
                "Give a divisor of num_experts.",
            )
        allowed = self.top_groups * self.group_size
        if allowed < self.top_k:
            least = math.ceil(self.top_k / self.group_size)
            raise _error(
                f"top_k is {self.top_k}, and top_groups={self.top_groups} groups have {allowed} experts.",
                f"Give top_groups={least} or more.",
            )
        if self.group_top_scores > self.group_size:
            raise _error(
                f"group_top_scores is {self.group_top_scores}, and a group has {self.group_size} experts.",
                f"Give 1 to {self.group_size}.",
            )


def _error(problem: str, remedy: str) -> RoutingError:
    return RoutingError("RouterRule", problem, remedy)
