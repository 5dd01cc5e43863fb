"""Estimates the time that a stage computes: products, attention and memory at the rates that the hardware attains, with
tensor parallel's communication where nothing hides it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from disttrain.plan.job import Choice, Job
from disttrain.plan.model.activations import is_lean, load_of
from disttrain.plan.model.parts import StageParts, elements_of, local_key_size
from disttrain.plan.model.sizes import LlamaSizes
from disttrain.plan.time.context import exposed_s
from disttrain.plan.time.exchange import exchange_s
from disttrain.plan.time.links import link_of
from disttrain.plan.time.products import grouped_product_s, product_s
from disttrain.plan.time.traffic import BLOCK_GATHERS, activation_bytes

EXPOSED_WITHIN_NODE = 0.35
"""Of tensor parallel's communication: the rest hides behind products, part by part, by copy engines."""
NCCL_SHARE = 24 / 132
"""Of a GPU's multiprocessors: those on which NCCL's channels run within a node, H100 and later."""
HOST_BLOCK_S = 1e-3
"""In which a host launches the forward of one block that is not compiled; its backward takes twice as long."""
HOST_COMPILED_BLOCK_S = 0.4e-3
CAPTURED_BLOCK_S, CAPTURED_GAPS_S = 0.056e-3, 0.0096e-3
"""In a captured step, of a block's forward, and twice in its backward: what its kernels take however small they are,
and what lies between one and the next, 16 of 3.5 and of 0.6 us."""
COMPILED_WEIGHT_SHARE = 0.05
"""Of a compiled block's backward that can be left for later: it is one node, which computes all gradients at once."""
WIDENING_RATE, WIDENED_ADDITION_RATE = 0.5, 0.66
"""Of a copy's, on H200: what torch's kernels attain that make float32 of bfloat16, and that add bfloat16 to float32."""
SHARED_MEMORY_BYTES = 227 << 10
"""Of a multiprocessor: a row of logits that is larger is read three times for its softmax, and else once."""


@dataclass(frozen=True)
class Computing:
    """Seconds of a forward, of a backward, of what in that computes weights' gradients, and of what tensor parallel
    and the exchange with experts add to both: communication that nothing hides."""

    forward: float
    backward: float
    weights: float
    tp_forward: float = 0.0
    tp_backward: float = 0.0
    exchange: float = 0.0
    """In each of both."""
    cp_forward: float = 0.0
    cp_backward: float = 0.0
    """Keys and values that are not there in time, and their gradients."""


@dataclass(frozen=True)
class StageTimes:
    """Of one microbatch on one stage: `again` is the forward that a checkpoint repeats, without communication; `tp`,
    `exchange` and `cp` are within the others."""

    forward: float
    backward: float
    weights: float
    again: float
    tp: float
    exchange: float
    cp: float

    @property
    def total_s(self) -> float:
        return self.forward + self.backward


@cache
def block_times(job: Job, choice: Choice) -> Computing:
    sizes, hardware, tp = job.sizes, job.hardware, choice.mesh.tp
    tokens, dtype = choice.tokens(job), job.precision.compute_bytes
    is_fused = choice.is_compiled or job.has_kernels
    keys = 2 * local_key_size(sizes, tp)
    products = _products(job, choice)
    attention = 2 * tokens * job.seq_size * sizes.attention_size / tp
    # What norms, sums, the gate and rotations read and write, and rows that are sorted by expert, and summed.
    experts, load = sizes.experts, load_of(job, choice.mesh.ep)
    widths = sizes.ffn_size if experts is None else experts.shared_size + load * experts.top_k * experts.ffn_size
    moved = (10 * sizes.dim + (3 if is_fused else 5) * widths) / tp
    moved += 0 if experts is None else experts.top_k * (3 + 2 * load * (choice.mesh.ep > 1)) * sizes.dim
    moved += (2 if is_fused else 8) * (sizes.query_size / tp + keys / 2)
    elementwise = dtype * tokens * moved / hardware.memory_bytes_per_s
    attended_s = attention / hardware.attention_forward_flops
    attended_back_s = 2.5 * attention / hardware.attention_backward_flops
    forward = products.forward + attended_s + elementwise
    backward = products.inputs + products.weights + attended_back_s + 2 * elementwise
    cp_there = exposed_s(job, choice, 1, attended_s, NCCL_SHARE)
    cp_back = exposed_s(job, choice, 2, attended_back_s, NCCL_SHARE)
    there, back = _exposed_s(job, choice, products)
    least_s, gaps_s = _launched_s(job, choice)
    whole = 0.0 if job.sizes.experts is None else exchange_s(job, choice)
    exchange = whole * (1 - job.assumed.hidden * (1 - NCCL_SHARE))
    return Computing(
        max(forward, least_s) + gaps_s + there + exchange + cp_there,
        max(backward, 2 * least_s) + 2 * gaps_s + back + exchange + cp_back,
        products.weights,
        there,
        back,
        exchange,
        cp_there,
        cp_back,
    )


def _launched_s(job: Job, choice: Choice) -> tuple[float, float]:
    """The least time of a block's forward, and what launching adds to it. Without a pipeline the host is ahead by a
    whole step, or behind by one."""
    if job.captures:
        return CAPTURED_BLOCK_S, CAPTURED_GAPS_S
    if choice.schedule is None:
        return 0.0, 0.0
    return HOST_COMPILED_BLOCK_S if choice.is_compiled else HOST_BLOCK_S, 0.0


@dataclass(frozen=True)
class _Products:
    """Seconds of a block's products, and of what goes with the communication of tensor parallel, also part by part.

    Args: inputs, weights  for gradients of these;  forward_parts  forward, where the rows that each rank has are
          multiplied by themselves;  cut_inputs, cut_inputs_parts  for gradients of what layers cut by rows take.
    """

    forward: float
    inputs: float
    weights: float
    forward_parts: float
    cut_inputs: float
    cut_inputs_parts: float


def _products(job: Job, choice: Choice) -> _Products:
    sizes, hardware, tp = job.sizes, job.hardware, choice.mesh.tp
    rows = choice.tokens(job)
    rate = hardware.float8_flops if job.uses_float8 else hardware.matmul_flops
    cut_by_columns, cut_by_rows = _matrices(sizes, tp)
    every = cut_by_columns + cut_by_rows

    def seconds(num_rows: float, matrices: Sequence[tuple[float, float]]) -> float:
        return sum(product_s(hardware, rate, num_rows, columns, inner) for inner, columns in matrices)

    back = [(columns, inner) for inner, columns in every]
    cut_back = [(columns, inner) for inner, columns in cut_by_rows]
    grouped = _grouped(job, choice, rate)
    return _Products(
        forward=seconds(rows, every) + grouped.forward,
        inputs=seconds(rows, back) + grouped.backward - grouped.weights,
        weights=sum(product_s(hardware, rate, columns, inner, rows) for inner, columns in every) + grouped.weights,
        forward_parts=tp * seconds(rows / tp, every) + grouped.forward,
        cut_inputs=seconds(rows, cut_back),
        cut_inputs_parts=tp * seconds(rows / tp, cut_back),
    )


def _matrices(sizes: LlamaSizes, tp: int) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """In and out of each matrix that all rows meet, in layers cut by columns and in those cut by rows."""
    dim, experts = float(sizes.dim), sizes.experts
    ffn = (sizes.ffn_size if experts is None else experts.shared_size) / tp
    if sizes.latent is None:
        key = float(local_key_size(sizes, tp))
        projections = [(dim, size) for size in (sizes.query_size / tp, key, key)]
    else:
        matrices = sizes.latent.matrices(sizes.dim, sizes.num_heads // tp)
        projections = [(float(columns), float(rows)) for rows, columns in matrices]
    router = [] if experts is None else [(dim, float(experts.num_experts))]
    gated = [(dim, ffn), (dim, ffn)] if ffn else []
    return projections + gated + router, [(sizes.value_size / tp, dim)] + [(ffn, dim)] * (ffn > 0)


def _grouped(job: Job, choice: Choice, rate: float) -> Computing:
    """The products of experts, on the rank that has most rows."""
    experts, mesh, hardware = job.sizes.experts, choice.mesh, job.hardware
    if experts is None:
        return Computing(0.0, 0.0, 0.0)
    num, dtype = experts.of_rank(mesh.ep), job.precision.compute_bytes
    tokens = choice.tokens(job)
    rows = tokens * experts.top_k * load_of(job, mesh.ep) / num
    dim, ffn = job.sizes.dim, experts.ffn_size / mesh.tp

    def seconds(out: float, columns: float, inner: float) -> float:
        return grouped_product_s(hardware, rate, num, (out, columns, inner), rows, dtype)

    forward = seconds(rows, 2 * ffn, dim) + seconds(rows, dim, ffn)
    inputs = seconds(rows, dim, 2 * ffn) + seconds(rows, ffn, dim)
    weights = seconds(2 * ffn, dim, rows) + seconds(dim, ffn, rows)
    return Computing(forward, inputs + weights, weights)


def _exposed_s(job: Job, choice: Choice, products: _Products) -> tuple[float, float]:
    """The time that tensor parallel adds to a block's forward and to its backward: communication that nothing hides,
    and what products lose that are computed part by part to hide it; the less of that and of whole collectives, whose
    sums of gradients alone are hidden, behind products for weights."""
    tp = choice.mesh.tp
    if tp == 1:
        return 0.0, 0.0
    link = link_of(job, choice, "tp")
    half = link.seconds(BLOCK_GATHERS * activation_bytes(job, choice), BLOCK_GATHERS)
    hidden = NCCL_SHARE * half + max(0.0, half - products.weights)
    there, back = 2 * half, half + hidden
    if choice.mesh.num_on_node("tp", job.node_size) < tp:
        return there, back
    parts = 2 * half * EXPOSED_WITHIN_NODE
    there = min(there, parts + products.forward_parts - products.forward)
    return there, min(back, parts + products.cut_inputs_parts - products.cut_inputs)


def _head(job: Job, choice: Choice) -> Computing:
    """The last norm, the head and the loss."""
    sizes, hardware, tp = job.sizes, job.hardware, choice.mesh.tp
    tokens, vocab = choice.tokens(job), job.sizes.vocab_size / tp
    product = product_s(hardware, hardware.matmul_flops, tokens, vocab, sizes.dim)
    logits_s = tokens * vocab / hardware.memory_bytes_per_s
    if job.has_kernels and not choice.has_whole_logits:
        # The loss without logits makes all gradients at once.
        return Computing(3 * product + 8 * logits_s, 0.0, 0.0)
    forward_bytes, backward_bytes = (4.0, 4) if is_lean(job, choice) else (6 / WIDENING_RATE + 8, 26)
    if not is_lean(job, choice) and 4 * vocab > SHARED_MEMORY_BYTES:
        forward_bytes += 8
    return Computing(product + forward_bytes * logits_s, 2 * product + backward_bytes * logits_s, product)


def _sums_s(job: Job, choice: Choice, stage: StageParts) -> float:
    """To add a microbatch's gradients to those before it; the mean over all microbatches."""
    precision, num = job.precision, choice.num_microbatches
    if num == 1 or choice.reduces_each:
        return 0.0
    if precision.is_sharded and precision.reduce_bytes > precision.compute_bytes:
        first = (precision.compute_bytes + precision.reduce_bytes) / WIDENING_RATE
        further = (precision.compute_bytes + 2 * precision.reduce_bytes) / WIDENED_ADDITION_RATE
    else:
        first, further = 0.0, 3.0 * precision.compute_bytes
    elements = elements_of(job.sizes, choice.mesh.tp, choice.mesh.ep)
    num_elements = elements.of(stage, is_tied=job.sizes.is_tied) + elements.experts_of(stage)
    return num_elements * (first + further * (num - 1)) / num / job.hardware.memory_bytes_per_s


def _again_s(job: Job, choice: Choice, block: Computing) -> float:
    """To compute a block's forward once more. Recomputation ends with the last value that was kept, so the last product
    is left out, but where one function computes it and what it keeps: cut by tp, in a graph, or in float8."""
    if not choice.recomputes:
        return 0.0
    if choice.mesh.tp > 1 or choice.is_compiled or job.uses_float8 or job.sizes.experts is not None:
        return block.forward
    tokens = choice.tokens(job)
    hardware, sizes = job.hardware, job.sizes
    return block.forward - product_s(hardware, hardware.matmul_flops, tokens, sizes.dim, sizes.ffn_size)


@cache
def stage_times(job: Job, choice: Choice, stage: StageParts) -> StageTimes:
    head, sums = _head(job, choice), _sums_s(job, choice, stage)
    forward, backward = stage.has_head * head.forward, stage.has_head * head.backward + sums
    weights = stage.has_head * head.weights + sums
    again_s = tp_s = sent_s = cp_s = 0.0
    for of_job, num in ((job, stage.num_blocks - stage.num_dense), (job.without_experts, stage.num_dense)):
        if not num:
            continue
        block = block_times(of_job, choice)
        again = _again_s(of_job, choice, block)
        forward += num * block.forward
        backward += num * (block.backward + again)
        weights += num * block.weights
        again_tp, again_exchange = block.tp_forward * choice.recomputes, block.exchange * choice.recomputes
        again_cp = block.cp_forward * choice.recomputes
        again_s += num * (again - again_tp - again_exchange - again_cp)
        tp_s += num * (block.tp_forward + block.tp_backward + again_tp)
        sent_s += num * (2 * block.exchange + again_exchange)
        cp_s += num * (block.cp_forward + block.cp_backward + again_cp)
    if choice.is_compiled:
        weights = COMPILED_WEIGHT_SHARE * backward
    return StageTimes(forward, backward, weights, again_s, tp_s, sent_s, cp_s)
