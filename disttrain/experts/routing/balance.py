"""Losses that keep the loads of experts even, and logits small, over the tokens of a rank, a sequence or the batch.

The balance loss is `num_experts * sum over experts of (share of choices * mean probability)`, from Switch Transformers
(arXiv:2101.03961); over each sequence, from DeepSeek-V2 (arXiv:2405.04434); over the whole batch, from "Demons in the
Detail" (arXiv:2501.11873). The z-loss, the mean of the squared logsumexp of the logits, is ST-MoE's (arXiv:2202.08906).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from disttrain.errors import RoutingError, ShapeError
from disttrain.experts.routing.axes import summed
from disttrain.experts.routing.choice import Routing, best, probabilities
from disttrain.experts.routing.rule import RouterRule
from disttrain.kernels.operators import call, define, differentiate
from disttrain.mesh import DeviceMesh, axis_of_several

SCOPES = ("rank", "sequence", "batch")


@dataclass(frozen=True)
class Balance:
    """The means by which a router keeps loads even in training.

    Args: aux_loss_coeff    what the balance loss is multiplied by; transformers' router_aux_loss_coef, or Megatron's
                            moe_aux_loss_coeff, as `is_per_choice` says.
          z_loss_coeff      what the z-loss is multiplied by.
          over              the tokens of which a loss is taken: rank, those of this rank; sequence, of each sequence,
                            and then the mean; batch, of all ranks of the router's `batch_axis`.
          is_per_choice     even loads give a balance loss of 1, as in Megatron-Core and DeepSeek; else of top_k, as in
                            transformers.
          counts_by_score   count the top_k of the scores, as DeepSeek-V3's formula does, in place of the choices, on
                            which a bias and groups have their effect.
          bias_update_rate  the step of the bias, which is there if this is not 0: see `update_expert_biases`.
    Raises: RoutingError for numbers that make no sense.
    """

    aux_loss_coeff: float = 0.0
    z_loss_coeff: float = 0.0
    over: str = "rank"
    is_per_choice: bool = True
    counts_by_score: bool = False
    bias_update_rate: float = 0.0

    def __post_init__(self) -> None:
        for name in ("aux_loss_coeff", "z_loss_coeff", "bias_update_rate"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
                raise RoutingError("Balance", f"{name} is {value!r}.", "Give 0 or a positive number.")
        if self.over not in SCOPES:
            raise RoutingError("Balance", f"over is {self.over!r}.", f"Give one of {', '.join(SCOPES)}.")

    @property
    def has_losses(self) -> bool:
        """A loss has a coefficient."""
        return bool(self.aux_loss_coeff or self.z_loss_coeff)


def balance_loss(
    routing: Routing,
    rule: RouterRule,
    *,
    mask: torch.Tensor | None = None,
    num_sequences: int = 1,
    axis: DeviceMesh | None = None,
    is_per_choice: bool = True,
    counts_by_score: bool = False,
) -> torch.Tensor:
    """Returns the balance loss of one layer, a number in the dtype of the scores.

    Over this rank's tokens; over each of `num_sequences` sequences of equal length, and then the mean; with an `axis`
    over the tokens, or sequences, of all its ranks together. One process that has all tokens computes the same.

    Args:    mask   (tokens,) bool, False of padding; sequences without a token that counts are left out.
             axis   a mesh of one axis. The value is the same on all its ranks. The gradient is group_size times that of
                    this rank's tokens: as data parallel takes the mean over the ranks, the whole batch's comes out.
             is_per_choice, counts_by_score  as in `Balance`.
    Raises:  ShapeError where tokens don't divide into sequences.
    Collective: with an axis, every rank, one all-reduce of 2 * (num_experts + 1) numbers per sequence; backward none.
    """
    sums = token_sums(
        routing,
        rule,
        probabilities(routing, rule),
        mask=mask,
        num_sequences=num_sequences,
        axis=axis,
        counts_by_score=counts_by_score,
    )
    return balance_of(sums, rule, is_per_choice=is_per_choice)


def z_loss(
    routing: Routing,
    rule: RouterRule,
    *,
    mask: torch.Tensor | None = None,
    num_sequences: int = 1,
    axis: DeviceMesh | None = None,
) -> torch.Tensor:
    """Returns the mean of the squared logsumexp of the tokens' logits; everything else is as in `balance_loss`."""
    shares = probabilities(routing, rule)
    return z_of(token_sums(routing, rule, shares, mask=mask, num_sequences=num_sequences, axis=axis))


class TokenSums(NamedTuple):
    """Sums over the tokens of each sequence."""

    counts: torch.Tensor
    """(sequences, experts): choices of each expert."""
    probabilities: torch.Tensor
    """(sequences, experts)"""
    squares: torch.Tensor
    """(sequences,): of the logsumexp."""
    tokens: torch.Tensor | int
    """(sequences,); a number where all sequences have as many."""


def token_sums(
    routing: Routing,
    rule: RouterRule,
    shares: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    num_sequences: int = 1,
    axis: DeviceMesh | None = None,
    counts_by_score: bool = False,
) -> TokenSums:
    """Sums what both losses need; see `balance_loss` for the arguments, and the gradients with an axis.

    Args: shares  `probabilities`.
    """
    num_tokens = len(routing.scores)
    if num_sequences < 1 or num_tokens % num_sequences:
        problem = f"{num_tokens} tokens don't divide into {num_sequences} sequences."
        raise ShapeError("balance_loss", problem, "Give the number of sequences of equal length.")
    chosen = best(routing.scores.detach(), rule.top_k) if counts_by_score else routing.indices
    squares = routing.logits.logsumexp(1).square()
    if mask is not None:
        shares, squares = shares.masked_fill(~mask[:, None], 0), squares.masked_fill(~mask, 0)
    length = num_tokens // num_sequences
    by_sequence = num_sequences, length
    sums = TokenSums(
        _counts(chosen.view(*by_sequence, rule.top_k), None if mask is None else mask.view(by_sequence), shares),
        shares.view(*by_sequence, rule.num_experts).sum(1),
        squares.view(by_sequence).sum(1),
        length if mask is None else mask.view(by_sequence).sum(1),
    )
    axis = axis_of_several("balance_loss", axis)
    return sums if axis is None else _over(sums, axis)


def balance_of(sums: TokenSums, rule: RouterRule, *, is_per_choice: bool) -> torch.Tensor:
    """The balance loss; zero where no token counts."""
    factor = rule.num_experts / (rule.top_k if is_per_choice else 1)
    if isinstance(sums.tokens, int):
        return (sums.counts * sums.probabilities).sum() * (factor / (max(1, sums.tokens) ** 2 * len(sums.counts)))
    tokens = sums.tokens.clamp(min=1)[:, None]
    return _mean((sums.counts / tokens * (sums.probabilities / tokens)).sum(1) * factor, sums.tokens)


def z_of(sums: TokenSums) -> torch.Tensor:
    """The z-loss; zero where no token counts."""
    if isinstance(sums.tokens, int):
        return sums.squares.sum() * (1 / (max(1, sums.tokens) * len(sums.counts)))
    return _mean(sums.squares / sums.tokens.clamp(min=1), sums.tokens)


def _mean(losses: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return losses.sum() / (tokens > 0).sum().clamp(min=1)


def _counts(chosen: torch.Tensor, mask: torch.Tensor | None, shares: torch.Tensor) -> torch.Tensor:
    num_sequences, num_experts = len(chosen), shares.shape[1]
    # What has no expert has the number after the last one.
    counts = shares.new_zeros(num_sequences, num_experts + 1)
    weights = shares.new_ones(()) if mask is None else mask[..., None].to(shares.dtype)
    return counts.scatter_add_(1, chosen.flatten(1), weights.expand_as(chosen).flatten(1))[:, :num_experts]


def _over(sums: TokenSums, axis: DeviceMesh) -> TokenSums:
    """The sums over all ranks, with group_size times the gradient of this rank's own."""
    sizes = [sums.counts.shape[1], sums.probabilities.shape[1], 1, 1]
    tokens = sums.squares.new_full(sums.squares.shape, sums.tokens) if isinstance(sums.tokens, int) else sums.tokens
    local = torch.cat([sums.counts, sums.probabilities, sums.squares[:, None], tokens[:, None]], 1)
    # In fp64 counts stay whole numbers.
    whole = summed(local.detach().double(), axis).to(local.dtype) + (local - local.detach()) * axis.size()
    counts, shares, squares, tokens = whole.split(sizes, 1)
    return TokenSums(counts, shares, squares[:, 0], tokens[:, 0])


def _with_loss(weights: torch.Tensor, loss: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return weights.clone()


def _keep_scale(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[2])
    ctx.loss_dtype = inputs[1].dtype


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    (scale,) = ctx.saved_tensors
    return grad, scale.to(ctx.loss_dtype), None


# An operator, since Dynamo warns of every autograd.Function.
_with_loss_op = define(
    "weights_with_loss(Tensor weights, Tensor loss, Tensor scale) -> Tensor",
    _with_loss,
    lambda weights, *_: torch.empty_like(weights),
)
differentiate(_with_loss_op, _keep_scale, _gradients)


def with_loss(weights: torch.Tensor, loss: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Returns the weights; in their backward pass the loss has `scale` as its gradient.

    So the loss takes part wherever the weights do: under activation checkpointing, in pipelines, and under
    `fully_shard`, without a way out of the model for it.

    Args: loss, scale  one number each.
    """
    result: torch.Tensor = call(_with_loss_op, weights, loss, scale)
    return result
