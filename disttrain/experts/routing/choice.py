"""Chooses experts by a rule: a function of logits, in fp32 or wider, without a word to the host on GPUs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from disttrain.errors import DisttrainError, RoutingError, ShapeError
from disttrain.experts.routing.rule import RouterRule
from disttrain.mesh import DeviceMesh, axis_of_several
from disttrain.process_group import ReduceOp, all_reduce
from disttrain.process_group._c10d import is_in_backward, is_traced
from disttrain.process_group.functional.functions import group_of
from disttrain.process_group.watching.refusals import ANY

OPERATION = "choose"


class Routing(NamedTuple):
    """The experts of each token, and their weights."""

    weights: torch.Tensor
    """(tokens, k), fp32, or fp64 of fp64: zero of masked tokens. They and `scores` have gradients."""
    indices: torch.Tensor
    """(tokens, k) int64: the best expert first; num_experts, which is no expert, of masked tokens."""
    scores: torch.Tensor
    """(tokens, experts): what was compared, before a bias: softmax or sigmoid; of softmax_of_chosen, the logits."""
    logits: torch.Tensor
    """(tokens, experts), in the dtype of the scores."""


def choose(
    logits: torch.Tensor,
    rule: RouterRule,
    expert_bias: torch.Tensor | None = None,
    *,
    mask: torch.Tensor | None = None,
    axis: DeviceMesh | None = None,
) -> Routing:
    """Chooses each token's experts.

    Args:    logits       (tokens, experts).
             expert_bias  (experts,), added to the scores for the choice alone; weights are taken from the scores.
             mask         (tokens,) bool, False of padding: such tokens go nowhere and have no gradient.
             axis         a mesh of one axis, over which ranks choose together and then wait for each other.
    Raises:  ShapeError for another width than rule.num_experts, or a mask or bias of another size.
             RoutingError for nan in the scores of a token that counts: on CPUs at once, and with an axis on all its
             ranks alike. On GPUs and in graphs, which would have to be waited for, the weights of such a token are nan;
             a Router counts these tokens on the device, and `read_statistics` raises.
    Collective: on CPUs with an axis of several ranks, an all-reduce of one number.
    """
    axis = axis_of_several(OPERATION, axis)
    error = _misfit(logits, rule, expert_bias, mask)
    if error is not None:
        tell(error, axis)
        raise error
    if mask is not None:
        # Here already: what padding holds, even nan, must not come into gradients.
        logits = logits.masked_fill(~mask[:, None], 0)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = scores_of(logits, rule)
    indices = _indices(scores.detach(), rule, expert_bias)
    weights = scores.gather(1, indices)
    if rule.score == "softmax_of_chosen":
        weights = weights.softmax(1)
    elif rule.renormalize:
        weights = weights / (weights.sum(1, keepdim=True) + rule.epsilon)
    if rule.scale != 1:
        weights = weights * rule.scale
    if mask is not None:
        weights = weights.masked_fill(~mask[:, None], 0)
        indices = indices.masked_fill(~mask[:, None], rule.num_experts)
    if weights.device.type == "cpu" and not is_traced() and not is_in_backward():
        _check_no_nan(weights, axis)
    return Routing(weights, indices, scores, logits)


def scores_of(logits: torch.Tensor, rule: RouterRule) -> torch.Tensor:
    """(tokens, experts): see `Routing.scores`."""
    if rule.score == "softmax":
        return logits.softmax(1)
    return logits.sigmoid() if rule.score == "sigmoid" else logits


def probabilities(routing: Routing, rule: RouterRule) -> torch.Tensor:
    """(tokens, experts), each token's of sum 1: softmax of the logits, or sigmoids divided by their sum."""
    if rule.score == "softmax":
        return routing.scores
    if rule.score == "sigmoid":
        return routing.scores / (routing.scores.sum(1, keepdim=True) + rule.epsilon)
    return routing.logits.softmax(1)


def weights_before_experts(x: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Multiplies tokens by their weights before the experts, as Llama 4 and torchtitan's score_before_experts do.

    `experts(*weights_before_experts(x, routing)).view(tokens, k, D).sum(1)` is the layer's output.

    Args:    x  (tokens, D).
    Returns: rows (tokens * k, D), each choice's own, in x's dtype; indices (tokens * k, 1); weights of 1.
    """
    weights = routing.weights
    rows = (x[:, None].to(weights.dtype) * weights[..., None]).to(x.dtype).flatten(0, 1)
    return rows, routing.indices.view(-1, 1), torch.ones_like(weights).view(-1, 1)


def best(values: torch.Tensor, k: int) -> torch.Tensor:
    """Places of the k largest of each row, the first of equal ones first; nan is larger than all."""
    # torch.topk says nothing of equal values, and CPUs and GPUs differ.
    # Contiguous, for kernels, and so that the places of all are let go.
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()


def _indices(scores: torch.Tensor, rule: RouterRule, expert_bias: torch.Tensor | None) -> torch.Tensor:
    if rule.force_load_balancing:
        turns = torch.arange(len(scores) * rule.top_k, device=scores.device) % rule.num_experts
        return turns.view(len(scores), rule.top_k)
    if expert_bias is not None:
        scores = scores + expert_bias.detach().to(scores.dtype)
    if rule.num_groups > 1 and rule.top_groups < rule.num_groups:
        by_group = scores.view(len(scores), rule.num_groups, rule.group_size)
        if rule.group_top_scores == 1:
            of_groups = by_group.amax(2)
        else:
            of_groups = by_group.topk(rule.group_top_scores, dim=2).values.sum(2)
        is_allowed = torch.zeros_like(of_groups, dtype=torch.bool).scatter(1, best(of_groups, rule.top_groups), True)
        scores = by_group.masked_fill(~is_allowed[..., None], -torch.inf).view_as(scores)
    return best(scores, rule.top_k)


def _misfit(
    logits: torch.Tensor, rule: RouterRule, expert_bias: torch.Tensor | None, mask: torch.Tensor | None
) -> ShapeError | None:
    if logits.dim() != 2 or logits.shape[1] != rule.num_experts or not logits.is_floating_point():
        problem = f"logits are {logits.dtype} of shape {tuple(logits.shape)}, the rule has {rule.num_experts} experts."
        return ShapeError(OPERATION, problem, f"Give floats of shape (tokens, {rule.num_experts}).")
    if expert_bias is not None and expert_bias.shape != (rule.num_experts,):
        problem = f"expert_bias has shape {tuple(expert_bias.shape)}, the rule {rule.num_experts} experts."
        return ShapeError(OPERATION, problem, "Give one number for each expert.")
    if mask is not None and (mask.shape != logits.shape[:1] or mask.dtype != torch.bool):
        problem = f"mask is {mask.dtype} of shape {tuple(mask.shape)} for {len(logits)} tokens."
        return ShapeError(OPERATION, problem, "Give a bool for each token, False of padding.")
    return None


def tell(error: DisttrainError, axis: DeviceMesh | None) -> None:
    """The other ranks of the axis would wait for this one."""
    if axis is not None and not is_traced():
        group_of(axis).refuse(error.operation, error, ANY)


def _check_no_nan(weights: torch.Tensor, axis: DeviceMesh | None) -> None:
    # A nan is larger than all other scores, so that it is chosen.
    num_bad = int(weights.detach().isnan().any(1).sum())
    if axis is None:
        if num_bad:
            raise _nan_error(f"{num_bad} of {len(weights)} tokens have")
        return
    group = group_of(axis)
    own_rank = group.world.rank
    last_bad = torch.tensor(own_rank if num_bad else -1)
    all_reduce(last_bad, ReduceOp.MAX, group)
    if num_bad:
        raise _nan_error(f"{num_bad} of {len(weights)} tokens have", own_rank)
    if last_bad >= 0:
        raise _nan_error(f"tokens of rank {int(last_bad)} have", own_rank)


def _nan_error(whose: str, rank: int | None = None) -> RoutingError:
    remedy = "Look for what gave it, before the router; padding is left out by `mask`."
    return RoutingError(OPERATION, f"{whose} nan in the scores of the experts.", remedy, rank=rank)
