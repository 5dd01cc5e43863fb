"""Counts activations: what a block keeps for its backward, and what comes and goes beside it, in bytes on one rank.

Counted tensor by tensor of a Llama's block under `disttrain.tp` with the sequence cut, whose layers keep their gathered
input, so that backward need not gather it again:

    norm keeps its input (a part), the projections theirs (whole), attention queries, keys, values, its output and the
    logarithm of its sums; the same again for the MLP, whose gate keeps its input and result, unless one kernel or graph
    does both; then the other factor, and their product.

With checkpoints only a block's input is kept, and one block's all else while it goes backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from disttrain.plan.job import Choice, Job
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


def kept_of(job: Job, choice: Choice) -> Kept:
    sizes, tp = job.sizes, choice.mesh.tp
    tokens = choice.microbatch_size * job.seq_size
    dtype = job.precision.compute_bytes
    dim, query, key = sizes.dim, sizes.query_size / tp, local_key_size(sizes, tp)
    ffn = sizes.ffn_size / tp
    is_fused = choice.is_compiled or job.has_kernels
    num_ffn = 3 if is_fused else 4
    statistics = 4 * (sizes.num_heads + 2) / tp
    whole = dtype * (2 * dim / tp + 2 * dim + 2 * query + 2 * key + num_ffn * ffn) + statistics
    pending = dtype * (4 * dim / tp + 4 * dim + 2 * query + 2 * key + 3 * ffn)
    backward = dtype * ((1 if is_fused else 2) * ffn + 2 * dim)
    weight = dtype * dim * ffn
    block = dtype * dim / tp if choice.recomputes else whole
    return Kept(
        block=round(tokens * block),
        # What a compiled block computes is all computed at once, and nothing waits.
        pending=0 if choice.is_compiled else round(tokens * min(pending, whole)),
        inside=round(tokens * (backward + (whole - block if choice.recomputes else 0)) + weight),
        head=round(tokens * dtype * (dim / tp + dim)),
        loss=_loss_bytes(job, choice, tokens),
        message=round(tokens * dtype * dim / tp),
    )


def is_lean(job: Job, choice: Choice) -> bool:
    """True where the loss of logits keeps no copies of them in float32."""
    return choice.mesh.tp > 1 or (choice.schedule is not None and job.has_lean_loss)


def _loss_bytes(job: Job, choice: Choice, tokens: int) -> int:
    tp, dim, dtype = choice.mesh.tp, job.sizes.dim, job.precision.compute_bytes
    vocab = -(-job.sizes.vocab_size // tp)
    if job.has_kernels and not choice.has_whole_logits:
        rows = min(tokens, max(1, _LOSS_BLOCK_BYTES // (vocab * dtype)))
        # Sums of the matrix's gradient in float32, a block of logits, the hidden gradient in two forms.
        return 4 * vocab * dim + dtype * rows * vocab + 2 * dtype * tokens * dim
    if is_lean(job, choice):
        # The vocabulary-parallel loss, also of one rank: the logits and their gradient.
        return 2 * dtype * tokens * vocab
    # In float32: what log_softmax keeps, the gradient of the loss, and that of the logits.
    return 3 * 4 * tokens * vocab
