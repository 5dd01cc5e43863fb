"""Jobs whose speed others have published, as the planner is asked about them: the mesh that they ran on, and the MFU.

MFU here is by the planner's count (6 FLOPs per token and element of a matrix but the embedding, the causal half of
attention, nothing twice), of the time or the tokens that were published; so it is not always the percentage in the
source, which counts what is computed twice, or all of attention. A GPT is taken for a Llama with as many elements: its
MLP of two matrices of 4 widths for one of three of 8/3. Where activations were recomputed in part, the planner knows
none or all: none is taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from disttrain.plan import (
    HARDWARE,
    PRESETS,
    Choice,
    ExpertAssumptions,
    Job,
    LlamaSizes,
    MeshSizes,
    preset_named,
)

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


def sizes_named(name: str) -> LlamaSizes:
    """Of a model that has experts."""
    sizes = preset_named(name)
    assert sizes is not None
    return sizes


def whole_attention_flops(sizes: LlamaSizes, num_tokens: int, seq_size: int) -> float:
    """Megatron's count of a step: as the planner's, but attention to all tokens, later ones too."""
    causal = sizes.flops(num_tokens, seq_size)
    return causal + num_tokens * 6.0 * sizes.num_layers * seq_size * sizes.attention_size


def _deepseek_v3() -> Published:
    sizes = sizes_named("deepseek-v3")
    assumed = ExpertAssumptions(imbalance=1.0, exchange_bytes=1, once_per_host=True, hidden=1.0)
    job = Job(sizes, 2048, HARDWARE["h800"], seq_size=4096, num_sequences=15_360, uses_float8=True, assumed=assumed)
    choice = Choice(MeshSizes(pp=16, dp=2, ep=64), 1, 120, "DualPipeV")
    source = (
        "DeepSeek-V3 Technical Report (arXiv:2412.19437): 180,000 GPU hours for 10^12 tokens, sequences of 4,096, "
        "15,360 of them a step; pipelines of 16, experts of 64 ranks on 8 hosts, ZeRO-1; a token on 4 hosts at most, "
        "dispatched in float8, all of it under other computing. DualPipe is taken for DualPipeV. What is not here: its "
        "module for a second token, norms and up-projections computed again, and the 20 of 132 multiprocessors that "
        "its exchange has for itself."
    )
    return Published("DeepSeek-V3, 2048 H800", job, choice, job.num_tokens * 180e3 * 3600 / 1e12 / 2048, source)


def _mixtral(num_gpus: int, num_sequences: int, utilization: float, table: str) -> Published:
    sizes = sizes_named("mixtral-8x22b")
    # Capacity 1: each expert has as many rows as any other.
    assumed = ExpertAssumptions(imbalance=1.0)
    job = Job(sizes, num_gpus, HARDWARE["h100"], seq_size=4096, num_sequences=num_sequences, assumed=assumed)
    mesh = MeshSizes(pp=8, dp=num_gpus // 64, ep=4, tp=2)
    microbatches = num_sequences // mesh.num_batch_parts
    choice = Choice(mesh, 1, microbatches, "Interleaved1F1B", is_compiled=True, stages_per_rank=7)
    flops = whole_attention_flops(sizes, job.num_tokens, 4096)
    step_s = flops / utilization / num_gpus / job.hardware.peak_flops
    source = (
        f"MoE Parallel Folding (arXiv:2504.14960), {table}, the row MCore: TP 2, EP 4, PP 8, experts cut by TP, too. "
        "Stages of each rank, and how attention is counted, are not said: 7, and all of it."
    )
    return Published(f"Mixtral 8x22B, {num_gpus} H100", job, choice, step_s, source)


def _qwen3_235b() -> Published:
    sizes = sizes_named("qwen3-235b-a22b")
    assumed = ExpertAssumptions(imbalance=1.0, once_per_host=True, hidden=1.0)
    job = Job(sizes, 256, HARDWARE["h100"], seq_size=4096, num_sequences=2048, assumed=assumed)
    choice = Choice(MeshSizes(pp=8, ep=32), 1, 64, "Interleaved1F1B", is_compiled=True, stages_per_rank=4)
    step_s = whole_attention_flops(sizes, job.num_tokens, 4096) / 256 / 320e12
    source = (
        "Scalable Training of Mixture-of-Experts Models with Megatron Core (arXiv:2603.07685), table 11: 320 TFLOP/s "
        "in bfloat16, balanced by force. The mesh is that of Megatron Bridge's recipe, TP 2, PP 8, EP 32, in which EP "
        "takes in the ranks of TP; here there is no TP. The batch, what is computed again, and how rows are sent, are "
        "not said: 2,048 sequences, nothing, and once to each host, under other computing."
    )
    return Published("Qwen3 235B A22B, 256 H100", job, choice, step_s, source)


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
MIXTURES = (
    _mixtral(128, 256, 0.463, "table 3"),
    _mixtral(1024, 1024, 0.423, "table 4"),
    _qwen3_235b(),
    _deepseek_v3(),
)
"""With experts. Of these nothing was fitted to a source."""


def exposed(published: Published) -> Job:
    """The job where nothing hides the exchange."""
    return replace(published.job, assumed=replace(published.job.assumed, hidden=0.0))
