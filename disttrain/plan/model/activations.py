"""Counts activations: what a block keeps for its backward, and what comes and goes beside it, in bytes on one rank.

Counted tensor by tensor of a Llama's block under `disttrain.tp` with the sequence cut, whose layers keep their gathered
input, so that backward need not gather it again:

    norm keeps its input (a part), the projections theirs (whole), attention queries, keys, values, its output and the
    logarithm of its sums; the same again for the MLP, whose gate keeps its input and result, unless one kernel or graph
    does both; then the other factor, and their product.

With checkpoints only a block's input is kept, and one block's all else while it goes backward.

In the place of an MLP, experts keep what the MLP of each row would that has come to the rank with most of them, and the
tokens' own rank what came back, for the gradients of the router's weights. While rows go one way or the other they are
there twice, as they are sent and as they are received. Blocks without experts, of a model that has some, are taken to
keep as much as those with them.
"""

from __future__ import annotations

from dataclasses import dataclass

from disttrain.plan.job import Choice, Job
from disttrain.plan.model.context import backward_bytes
from disttrain.plan.model.parts import local_key_size

_LOSS_BLOCK_BYTES = 1 << 30
"""Of logits at one time: `BLOCK_BYTES` of `kernels.linear_loss_plan`, which loads torch."""


@dataclass(frozen=True)
class Kept:
    """Bytes, for one microbatch on one rank."""

    block: int
    """By a block, from its forward until its backward."""
    pending: int
    """By a block whose weights' gradients are still to come: inputs of its layers, and their outputs' gradients."""
    inside: int
    """By the one block that is in its backward, beyond that."""
    head: int
    """By the last norm and the head."""
    loss: int
    """By the loss, while it is computed and differentiated."""
    message: int
    """One that goes to another stage."""
    exchange: int = 0
    """Rows of one block that are sent, and received, at a time."""


def kept_of(job: Job, choice: Choice) -> Kept:
    sizes, tp = job.sizes, choice.mesh.tp
    tokens = choice.tokens(job)
    dtype = job.precision.compute_bytes
    dim, attention = sizes.dim, _attention_elements(job, choice)
    is_fused = choice.is_compiled or job.has_kernels
    num_ffn = 3 if is_fused else 4
    ffn, to_experts, back = _mlp_widths(job, choice)
    statistics = 4 * (sizes.num_heads + 2) / tp + 4 * (0 if sizes.experts is None else sizes.experts.num_experts)
    whole = dtype * (2 * dim / tp + 2 * dim + attention + num_ffn * ffn + (to_experts + back) * dim) + statistics
    pending = dtype * (4 * dim / tp + 4 * dim + attention + 3 * ffn + (2 * to_experts + back) * dim)
    # The gradients of a gate and of the other factor lie beside that of their product, but in one graph.
    backward = dtype * ((1 if choice.is_compiled else 2) * ffn + (2 + to_experts + back) * dim)
    # When attention goes backward, what the MLP has kept is gone.
    of_mlp = dtype * (num_ffn * ffn + (to_experts + back + 1) * dim + dim / tp)
    backward = max(backward, backward_bytes(job, choice) - of_mlp)
    weight = dtype * dim * ffn if sizes.experts is None else 0
    block = dtype * dim / tp if choice.recomputes else whole
    return Kept(
        block=round(tokens * block),
        # What a compiled block computes is all computed at once, and nothing waits.
        pending=0 if choice.is_compiled else round(tokens * min(pending, whole)),
        inside=round(tokens * (backward + (whole - block if choice.recomputes else 0)) + weight),
        head=round(tokens * dtype * (dim / tp + dim)),
        loss=_loss_bytes(job, choice, tokens),
        message=round(tokens * dtype * dim / tp),
        exchange=round(tokens * dtype * dim * (to_experts + back)) if choice.mesh.ep > 1 else 0,
    )


def _attention_elements(job: Job, choice: Choice) -> float:
    """Queries, keys, values and the output of attention, for a token, on one rank of tensor parallel."""
    sizes, tp = job.sizes, choice.mesh.tp
    if sizes.latent is None:
        return 2 * sizes.query_size / tp + 2 * local_key_size(sizes, tp)
    # The small vectors before and after their norms; keys of all heads, as queries.
    small = 2 * sizes.latent.norm_elements + sizes.latent.rotary_size
    return (2 * sizes.query_size + 2 * sizes.value_size) / tp + small


def _mlp_widths(job: Job, choice: Choice) -> tuple[float, float, float]:
    """Returns, for a token of a rank, the width of all gated layers that there are for it on the rank with most rows,
    and the rows that go to experts there, and that come back."""
    experts, tp = job.sizes.experts, choice.mesh.tp
    if experts is None:
        return job.sizes.ffn_size / tp, 0.0, 0.0
    rows = experts.top_k * load_of(job, choice.mesh.ep)
    return (rows * experts.ffn_size + experts.shared_size) / tp, rows, experts.top_k


def load_of(job: Job, ep: int) -> float:
    """Returns the rows of the rank along ep that has most, over the mean."""
    experts = job.sizes.experts
    if experts is None or ep == 1:
        return 1.0
    return min(float(ep), job.assumed.imbalance * experts.of_rank(ep) * ep / experts.num_experts)


def is_lean(job: Job, choice: Choice) -> bool:
    """True where the loss of logits keeps no copies of them in float32."""
    return choice.mesh.tp > 1 or (choice.schedule is not None and job.has_lean_loss)


def _loss_bytes(job: Job, choice: Choice, tokens: float) -> int:
    tp, dim, dtype = choice.mesh.tp, job.sizes.dim, job.precision.compute_bytes
    vocab = -(-job.sizes.vocab_size // tp)
    if job.has_kernels and not choice.has_whole_logits:
        rows = min(tokens, max(1, _LOSS_BLOCK_BYTES // (vocab * dtype)))
        # Sums of the matrix's gradient in float32, a block of logits, the hidden gradient in two forms.
        return round(4 * vocab * dim + dtype * rows * vocab + 2 * dtype * tokens * dim)
    if is_lean(job, choice):
        # The vocabulary-parallel loss, also of one rank: the logits and their gradient.
        return round(2 * dtype * tokens * vocab)
    # In float32: what log_softmax keeps, the gradient of the loss, and that of the logits.
    return round(3 * 4 * tokens * vocab)
