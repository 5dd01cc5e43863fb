"""Tensor parallel against torch's own on the same Llama-shaped model, on GPUs, in one run, interleaved.

    disttrain-launch --standalone --nproc-per-node gpu benchmarks/tp_gpu.py --out results.json

All GPUs are one axis, activations lie along the sequence between the layers. Cases: ours with its vocabulary-parallel
loss, ours without overlap, torch with a loss over gathered logits, torch with its loss_parallel. Prints step time,
tokens per second and GPU, and peak memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from harness import flags_of, keep
from torch import nn
from torch.distributed import tensor as torch_tensor
from torch.distributed.device_mesh import init_device_mesh as torch_mesh
from torch.distributed.tensor import parallel as torch_tp

import disttrain
from disttrain import dtensor, tp

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


class Attention(nn.Module):
    """Grouped-query attention without rotation."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Gated."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A decoder's."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(args.dim)
        self.attention = Attention(args.dim, args.heads, args.kv_heads)
        self.mlp_norm = nn.RMSNorm(args.dim)
        self.mlp = MLP(args.dim, args.ffn)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(args.vocab, args.dim)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.dim)
        self.head = nn.Linear(args.dim, args.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def plan(styles: Any, placements: Any, logits: Any, **options: Any) -> dict[str, Any]:
    """The same for both: torch's names are ours. `options` of the layers, `logits` those of the head."""
    shard, whole = placements.Shard(1), placements.Replicate()
    prepare = {"input_layouts": shard, "desired_input_layouts": whole}
    found = {
        "embedding": styles.RowwiseParallel(input_layouts=whole, output_layouts=shard),
        "norm": styles.SequenceParallel(),
        "head": styles.ColwiseParallel(input_layouts=shard, **logits),
        "blocks.*.attention_norm": styles.SequenceParallel(),
        "blocks.*.attention": styles.PrepareModuleInput(**prepare),
        "blocks.*.attention.out": styles.RowwiseParallel(output_layouts=shard, **options),
        "blocks.*.mlp_norm": styles.SequenceParallel(),
        "blocks.*.mlp": styles.PrepareModuleInput(**prepare),
        "blocks.*.mlp.down": styles.RowwiseParallel(output_layouts=shard, **options),
    }
    for name in ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up"):
        found[f"blocks.*.{name}"] = styles.ColwiseParallel(**options)
    return found


class Case:
    """A model that one of the two has cut, and its loss."""

    def __init__(self, args: argparse.Namespace, parallelize: Callable[[nn.Module], nn.Module], loss: Any) -> None:
        with torch.device("meta"):
            model = Model(args).bfloat16()
        self.model = parallelize(model)
        self.model.to_empty(device=torch.cuda.current_device())
        with torch.no_grad():
            for parameter in self.model.parameters():
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                local.normal_(std=0.02) if parameter.ndim > 1 else local.fill_(1.0)
        if args.compile:
            for block in self.model.blocks:
                block.compile(fullgraph=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.loss = loss

    def step(self, tokens: torch.Tensor) -> float:
        """Seconds of one training step on this rank, from a common start."""
        torch.cuda.synchronize()
        disttrain.barrier()
        begin = time.perf_counter()
        self.loss(self.model, tokens)
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    @property
    def resting_bytes(self) -> int:
        """What parameters and the optimizer's state hold."""
        state = [v for s in self.optimizer.state.values() for v in s.values() if v.ndim]
        tensors = [t.to_local() if hasattr(t, "to_local") else t for t in (*self.model.parameters(), *state)]
        return sum(tensor.nbytes for tensor in tensors)


def gathered_loss(model: nn.Module, tokens: torch.Tensor, context: Any = nullcontext) -> None:
    with context():
        F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()


def cases_of(args: argparse.Namespace, mesh: disttrain.DeviceMesh, other_mesh: Any) -> dict[str, Case]:
    def own_loss(model: nn.Module, tokens: torch.Tensor) -> None:
        tp.vocab_parallel_cross_entropy(model(tokens), tokens, mesh, vocab_size=args.vocab).backward()

    whole, other_whole = dtensor.Replicate(), torch_tensor.Replicate()
    made = {}
    for name, overlap in (("disttrain", None), ("disttrain, no overlap", False)):
        own_plan = plan(tp, dtensor, {"overlap": overlap}, overlap=overlap)
        made[name] = Case(args, lambda model, p=own_plan: tp.parallelize_module(model, mesh, p), own_loss)
    if args.gathered:
        own_plan = plan(tp, dtensor, {"output_layouts": whole})
        made["disttrain, gathered logits"] = Case(
            args, lambda model: tp.parallelize_module(model, mesh, own_plan), gathered_loss
        )
    for name, logits, context in (
        ("torch", {"output_layouts": other_whole}, nullcontext),
        ("torch, loss_parallel", {"use_local_output": False}, torch_tp.loss_parallel),
    ):
        other_plan = plan(torch_tp, torch_tensor, logits)
        made[name] = Case(
            args,
            lambda model, p=other_plan: torch_tp.parallelize_module(model, other_mesh, p),
            lambda model, tokens, context=context: gathered_loss(model, tokens, context),
        )
    return made


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
    parser.add_argument("--gathered", action="store_true", help="also ours with a loss over gathered logits")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--trace", type=Path, help="write a trace of a step of each case to files of this prefix")
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    disttrain.init_process_group()
    torch.distributed.init_process_group("nccl")
    size = disttrain.get_world_size()
    cases = cases_of(
        args,
        disttrain.init_device_mesh("cuda", (size,), mesh_dim_names=("tp",)),
        torch_mesh("cuda", (size,), mesh_dim_names=("tp",)),
    )
    tokens = torch.randint(0, args.vocab, (args.batch, args.seq), device="cuda")
    disttrain.broadcast(tokens, 0)
    times: dict[str, list[float]] = {name: [] for name in cases}
    for round_number in range(args.steps + 3):
        for name, case in cases.items():
            elapsed = case.step(tokens)
            if round_number >= 3:
                times[name].append(elapsed)
    rows = {}
    resting = sum(case.resting_bytes for case in cases.values())
    for name, case in cases.items():
        torch.cuda.reset_peak_memory_stats()
        case.step(tokens)
        seconds = slowest(statistics.median(times[name]))
        rows[name] = {
            "step_ms": 1e3 * seconds,
            "min_ms": 1e3 * slowest(min(times[name])),
            "tokens_per_s_gpu": tokens.numel() / seconds / size,
            "peak_gib": slowest((torch.cuda.max_memory_allocated() - resting + case.resting_bytes) / 2**30),
        }
        if args.trace:
            with torch.profiler.profile() as profile:
                case.step(tokens)
            if disttrain.get_rank() == 0:
                profile.export_chrome_trace(f"{args.trace}.{name.replace(', ', '_').replace(' ', '_')}.json")
    if disttrain.get_rank() == 0:
        ratios = {key: rows["torch"][key] / rows["disttrain"][key] for key in ("step_ms", "peak_gib")}
        for name, row in rows.items():
            print(f"{name:28s}", "  ".join(f"{key} {value:10.3f}" for key, value in row.items()))
        print("torch over disttrain:", ratios)
        if args.out:
            settings = flags_of(args)
            gpus = f"{size} x {torch.cuda.get_device_name()}"
            report = {"torch_version": torch.__version__, "gpus": gpus, "arguments": settings, **rows, "ratio": ratios}
            keep(report, args.out)
    torch.distributed.destroy_process_group()
    disttrain.destroy_process_group()


if __name__ == "__main__":
    main()
