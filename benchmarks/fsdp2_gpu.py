"""fully_shard against torch's own on the same Llama-shaped model, on GPUs, in one run, interleaved.

    disttrain-launch --standalone --nproc-per-node gpu benchmarks/fsdp2_gpu.py --out results.json

Prints step time, tokens per second and GPU, TFLOP/s and peak memory of both, and their ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed
import torch.nn.functional as F
from harness import flags_of, keep
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import disttrain
from disttrain.fsdp2 import MixedPrecisionPolicy, fully_shard
from disttrain.kernels import use_float8

SIZES = {
    "dim": 4096,
    "heads": 32,
    "kv_heads": 8,
    "ffn": 14336,
    "layers": 8,
    "vocab": 32000,
    "seq": 8192,
    "batch": 1,
    "steps": 8,
}
Case = tuple[nn.Module, torch.optim.Optimizer]


class Block(nn.Module):
    """Grouped-query attention without rotation, and a gated MLP."""

    def __init__(self, dim: int, heads: int, kv_heads: int, ffn: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.norm = nn.RMSNorm(dim)
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.ffn_norm = nn.RMSNorm(dim)
        self.gate = nn.Linear(dim, ffn, bias=False)
        self.up = nn.Linear(dim, ffn, bias=False)
        self.down = nn.Linear(ffn, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        h = self.norm(x)
        q, k, v = (
            linear(h).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, dim))
        h = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(args.vocab, args.dim)
        self.blocks = nn.ModuleList(Block(args.dim, args.heads, args.kv_heads, args.ffn) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.dim)
        self.head = nn.Linear(args.dim, args.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(args: argparse.Namespace, shard: Callable[..., object], policy: object, recipe: str = "") -> Case:
    with torch.device("meta"):
        model = Model(args)
    if recipe:
        use_float8(model, recipe, num_tokens=None, report=lambda _: None)
    for block in model.blocks:
        shard(block, mp_policy=policy)
        if args.compile:
            block.compile(fullgraph=True)
    shard(model, mp_policy=policy)
    model.to_empty(device=torch.cuda.current_device())
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local()
            local.normal_(std=0.02) if parameter.ndim > 1 else local.fill_(1.0)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def step(case: Case, tokens: torch.Tensor) -> float:
    """Seconds of one training step on this rank, from a common start."""
    model, optimizer = case
    torch.cuda.synchronize()
    disttrain.barrier()
    begin = time.perf_counter()
    loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(cases: dict[str, Case], tokens: torch.Tensor, num_steps: int) -> dict[str, list[float]]:
    """Step times of all cases, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for round_number in range(num_steps + 3):
        for name, case in cases.items():
            elapsed = step(case, tokens)
            if round_number >= 3:
                times[name].append(elapsed)
    return times


def peak_gib(case: Case, tokens: torch.Tensor, others: list[Case]) -> float:
    """Peak memory of one step, less what the other cases hold at rest."""
    torch.cuda.synchronize()
    resting = sum(
        t.to_local().nbytes
        for model, optimizer in others
        for t in [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values() if v.ndim)]
    )
    torch.cuda.reset_peak_memory_stats()
    step(case, tokens)
    return (torch.cuda.max_memory_allocated() - resting) / 2**30


def slowest(seconds: float) -> float:
    """The largest of all ranks' values."""
    value = torch.tensor(seconds, dtype=torch.float64)
    disttrain.all_reduce(value, disttrain.ReduceOp.MAX)
    return value.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument(
        "--float8", default="", metavar="RECIPE", help="our linear layers in float8: tensorwise, rowwise"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    disttrain.init_process_group()
    torch.distributed.init_process_group("nccl")
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    cases = {
        "disttrain": build(args, fully_shard, MixedPrecisionPolicy(**dtypes), args.float8),
        "torch": build(args, torch_fully_shard, TorchPolicy(**dtypes)),
    }
    tokens = torch.randint(0, args.vocab, (args.batch, args.seq), device="cuda")
    times = measure(cases, tokens, args.steps)
    rows = {}
    for name, case in cases.items():
        seconds = slowest(statistics.median(times[name]))
        rows[name] = {
            "step_ms": 1e3 * seconds,
            "min_ms": 1e3 * slowest(min(times[name])),
            "tokens_per_s_gpu": tokens.numel() / seconds,
            "peak_gib": slowest(peak_gib(case, tokens, [c for n, c in cases.items() if n != name])),
        }
    if disttrain.get_rank() == 0:
        ratios = {key: rows["disttrain"][key] / rows["torch"][key] for key in rows["torch"]}
        for name, row in {**rows, "ratio": ratios}.items():
            print(f"{name:10s}", "  ".join(f"{key} {value:10.3f}" for key, value in row.items()))
        if args.out:
            settings = flags_of(args)
            gpus = f"{disttrain.get_world_size()} x {torch.cuda.get_device_name()}"
            report = {"torch_version": torch.__version__, "gpus": gpus, "arguments": settings, **rows, "ratio": ratios}
            keep(report, args.out)
    torch.distributed.destroy_process_group()
    disttrain.destroy_process_group()


if __name__ == "__main__":
    main()
