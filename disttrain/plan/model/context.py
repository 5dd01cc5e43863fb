"""Counts what attention takes of a rank along cp: keys of others on their way, and sums in fp32, in bytes.

Heads are computed in groups, one behind the other, so that neither grows with a long sequence as activations do.
"""

from __future__ import annotations

from disttrain.plan.job import Choice, Job
from disttrain.plan.model.parts import local_key_size

_GROUP_ELEMENTS = 1 << 25
"""Of the queries of a group of heads: `heads_cut._GROUP_ELEMENTS` of `kernels.attention`, which loads torch."""
_NUM_SLOTS = 4
"""Two for keys of others, two for terms of their gradients; each takes a step of the ring."""


def num_groups_of(job: Job, choice: Choice) -> int:
    """Into how many groups a rank's heads are divided, as `heads_cut.num_head_groups` does."""
    sizes, tp = job.sizes, choice.mesh.tp
    num_kv_heads = sizes.num_heads // tp if sizes.latent is not None else max(1, sizes.num_kv_heads // tp)
    num_elements = choice.tokens(job) * sizes.query_size / tp
    counts = (count for count in range(1, num_kv_heads + 1) if num_kv_heads % count == 0)
    return max(count for count in counts if count == 1 or num_elements >= count * _GROUP_ELEMENTS)


def key_elements(job: Job, choice: Choice) -> float:
    """Of keys and values of a token, on one rank of tensor parallel."""
    sizes, tp = job.sizes, choice.mesh.tp
    return 2.0 * local_key_size(sizes, tp) if sizes.latent is None else (sizes.query_size + sizes.value_size) / tp


def slots_bytes(job: Job, choice: Choice) -> int:
    """Memory for keys and terms that come round the ring; all blocks share it."""
    if choice.mesh.cp == 1:
        return 0
    step = choice.tokens(job) * key_elements(job, choice) * job.precision.compute_bytes
    return round(_NUM_SLOTS * step / num_groups_of(job, choice))


def backward_bytes(job: Job, choice: Choice) -> float:
    """Per token, in attention's backward, beyond what is kept for it: sums of one group of heads, gradients of all."""
    if choice.mesh.cp == 1:
        return 0.0
    sizes, dtype = job.sizes, job.precision.compute_bytes
    query, keys = sizes.query_size / choice.mesh.tp, key_elements(job, choice)
    # Of keys twice: of this rank's, and terms for those of another.
    sums = 4 * (query + 2 * keys) + dtype * (query + keys)
    return sums / num_groups_of(job, choice) + dtype * (2 * query + keys)
