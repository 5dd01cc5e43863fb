"""Jobs whose speed others have published, as the planner is asked about them: the mesh that they ran on, and the MFU.

MFU here is by the planner's count (6 FLOPs per token and element of a matrix but the embedding, the causal half of
attention, nothing twice), of the time or the tokens that were published; so it is not always the percentage in the
source, which counts what is computed twice, or all of attention. A GPT is taken for a Llama with as many elements: its
MLP of two matrices of 4 widths for one of three of 8/3. Where activations were recomputed in part, the planner knows
none or all: none is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from disttrain.plan import HARDWARE, PRESETS, Choice, Job, LlamaSizes, MeshSizes

GPT_VOCAB = 51_200


@dataclass(frozen=True)
class Published:
    """One job. `step_s` is what a step took, `source` where that is said, and what is not said there."""

    name: str
    job: Job
    choice: Choice
    step_s: float
    source: str

    @property
    def utilization(self) -> float:
        flops = self.job.sizes.flops(self.job.num_tokens, self.job.seq_size)
        return flops / self.step_s / self.job.num_gpus / self.job.hardware.peak_flops


def gpt(dim: int, num_layers: int, num_heads: int) -> LlamaSizes:
    """A GPT as a Llama with as many elements, to a multiple of 64 in its MLP."""
    return LlamaSizes(dim, num_layers, num_heads, num_heads, 64 * round(dim * 8 / 3 / 64), GPT_VOCAB)


def gpt_flops(sizes: LlamaSizes, num_sequences: int, seq_size: int, *, recomputes: bool) -> float:
    """Megatron's count of a step (arXiv:2104.04473, equation 3): all of attention, and the forward that is repeated."""
    dim, num_layers = sizes.dim, sizes.num_layers
    per_token = (96 if recomputes else 72) * num_layers * dim**2
    return num_sequences * seq_size * per_token * (1 + seq_size / 6 / dim + GPT_VOCAB / 16 / num_layers / dim)


def _llama_405b(num_gpus: int, utilization: float, num_microbatches: int) -> Published:
    sizes = PRESETS["405b"]
    job = Job(sizes, num_gpus, HARDWARE["h100"], seq_size=8192, num_sequences=2048)
    mesh = MeshSizes(pp=16, dp=num_gpus // 128, tp=8)
    choice = Choice(mesh, 1, num_microbatches, "Interleaved1F1B", is_compiled=True, stages_per_rank=7)
    step_s = sizes.flops(job.num_tokens, 8192) / utilization / num_gpus / job.hardware.peak_flops
    source = (
        "The Llama 3 Herd of Models (arXiv:2407.21783), table 4: MFU in bfloat16, its count not said. 128 stages, of "
        "which two have no block; here 112, since each has one."
    )
    return Published(f"Llama 3 405B, {num_gpus} H100", job, choice, step_s, source)


def _megatron(
    name: str, sizes: LlamaSizes, mesh: MeshSizes, num_sequences: int, stages_per_rank: int, tflops: float, source: str
) -> Published:
    job = Job(sizes, mesh.num_gpus, HARDWARE["a100"], seq_size=2048, num_sequences=num_sequences)
    # Their first report counts the forward that is repeated, the second does not repeat it.
    recomputes = "2104" in source
    choice = Choice(
        mesh,
        1,
        num_sequences // mesh.dp,
        "Interleaved1F1B",
        recomputes=recomputes,
        is_compiled=True,
        stages_per_rank=stages_per_rank,
    )
    flops = gpt_flops(sizes, num_sequences, 2048, recomputes=recomputes)
    return Published(name, job, choice, flops / mesh.num_gpus / tflops / 1e12, source)


def _fsdp(model: str, seq_size: int, batch_size: int, tokens_per_s: float, *, recomputes: bool) -> Published:
    sizes = PRESETS[model]
    job = Job(sizes, 64, HARDWARE["a100"], seq_size=seq_size, num_sequences=64 * batch_size)
    choice = Choice(MeshSizes(dp=64), batch_size, 1, recomputes=recomputes)
    name = f"{'Llama 2' if model == '13b' else 'Llama 3'} {model.upper()}, 64 A100"
    source = "torchtitan, docs/performance.md of 2024: tokens per second of a GPU. Its network is not said."
    return Published(name, job, choice, job.num_tokens / 64 / tokens_per_s, source)


_SC21 = "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM (arXiv:2104.04473), table 1"
JOBS = (
    _llama_405b(16_384, 0.41, 16),
    _llama_405b(8_192, 0.43, 32),
    _megatron(
        "GPT 1T, 3072 A100",
        gpt(25_600, 128, 160),
        MeshSizes(pp=64, dp=6, tp=8),
        3072,
        2,
        163,
        f"{_SC21}: 163 TFLOP/s. Stages per rank are not said.",
    ),
    _megatron(
        "GPT 530B, 2240 A100",
        gpt(20_480, 105, 128),
        MeshSizes(pp=35, dp=8, tp=8),
        2240,
        3,
        0.542 * 312,
        "Reducing Activation Recomputation in Large Transformer Models (arXiv:2205.05198): 54.2 % MFU.",
    ),
    _megatron(
        "GPT-3 175B, 1536 A100",
        gpt(12_288, 96, 96),
        MeshSizes(pp=16, dp=12, tp=8),
        1536,
        2,
        148,
        f"{_SC21}: 148 TFLOP/s. Stages per rank are not said.",
    ),
    _fsdp("70b", 8192, 1, 331, recomputes=True),
    _fsdp("13b", 4096, 2, 2162, recomputes=False),
)
