"""The planner's estimates against real steps: memory and time of one Llama on several meshes of four GPUs, or two.

    disttrain-launch --standalone --nproc-per-node 4 benchmarks/plan_gpu.py --out plan_gpu.json

Each case makes the model anew on its mesh, trains a few steps as examples/train_llama.py does (parameters in float32
under `fully_shard`, computed with in bfloat16; AdamW), and stands beside `disttrain.plan`'s estimate for the same
choice. Peak memory is what PyTorch has allocated on the fullest GPU, time the median of the slowest rank's steps.
Where ranks share GPUs, memory is each rank's own, and right; messages go by sockets then, and no time is kept.

On the CPU, to see that it runs: --device cpu and small sizes; there is no memory to measure then.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import asked, keep
from pipelines.model import Sizes, Stage
from torch import nn
from torch.utils.checkpoint import checkpoint
from tp_gpu import Block

import disttrain
from disttrain import kernels, tp
from disttrain.compiling import compile_blocks
from disttrain.fsdp2 import MixedPrecisionPolicy, fully_shard
from disttrain.pipelining import PipelineSchedule, PipelineStage, make_schedule
from disttrain.plan import HARDWARE, Choice, Job, LlamaSizes, MeshSizes, plan_of
from disttrain.plan.model.parts import stages_of

GIB = 2**30
NUM_WARMUPS = 2
MODEL = ("dim", "heads", "kv_heads", "ffn", "layers", "vocab", "seq")
CASES = {
    4: (
        ("dp=4", Choice(MeshSizes(dp=4), 2, 2), False),
        ("dp=4, reduce each", Choice(MeshSizes(dp=4), 1, 4, reduces_each=True), False),
        ("dp=4, one microbatch", Choice(MeshSizes(dp=4), 4, 1), False),
        ("dp=4, recompute", Choice(MeshSizes(dp=4), 4, 1, recomputes=True), False),
        ("replicate=2,dp=2", Choice(MeshSizes(replicate=2, dp=2), 2, 2), False),
        ("tp=4", Choice(MeshSizes(tp=4), 4, 4), False),
        ("dp=2,tp=2", Choice(MeshSizes(dp=2, tp=2), 4, 2), False),
        ("pp=4, 1F1B", Choice(MeshSizes(pp=4), 1, 16, "1F1B"), False),
        ("pp=2,dp=2, Interleaved1F1B", Choice(MeshSizes(pp=2, dp=2), 1, 8, "Interleaved1F1B"), False),
        ("pp=2,dp=2, 1F1B, recompute", Choice(MeshSizes(pp=2, dp=2), 1, 8, "1F1B", recomputes=True), False),
        ("pp=2,tp=2, ZBV", Choice(MeshSizes(pp=2, tp=2), 1, 16, "ZBVZeroBubble"), False),
        ("dp=4, kernels", Choice(MeshSizes(dp=4), 4, 1), True),
    ),
    2: (
        ("dp=2", Choice(MeshSizes(dp=2), 2, 2), False),
        ("dp=2, one microbatch", Choice(MeshSizes(dp=2), 4, 1), False),
        ("dp=2, reduce each", Choice(MeshSizes(dp=2), 1, 4, reduces_each=True), False),
        ("dp=2, recompute", Choice(MeshSizes(dp=2), 4, 1, recomputes=True), False),
        ("replicate=2", Choice(MeshSizes(replicate=2), 2, 2), False),
        ("tp=2", Choice(MeshSizes(tp=2), 4, 2), False),
        ("tp=2, recompute", Choice(MeshSizes(tp=2), 4, 2, recomputes=True), False),
        ("pp=2, 1F1B", Choice(MeshSizes(pp=2), 1, 8, "1F1B"), False),
        ("pp=2, Interleaved1F1B", Choice(MeshSizes(pp=2), 1, 8, "Interleaved1F1B"), False),
        ("pp=2, ZBV", Choice(MeshSizes(pp=2), 1, 8, "ZBVZeroBubble"), False),
        ("pp=2, 1F1B, recompute", Choice(MeshSizes(pp=2), 1, 8, "1F1B", recomputes=True), False),
        ("dp=2, kernels", Choice(MeshSizes(dp=2), 4, 1), True),
        ("dp=2, kernels, recompute", Choice(MeshSizes(dp=2), 4, 1, recomputes=True), True),
        ("tp=2, kernels", Choice(MeshSizes(tp=2), 4, 2), True),
        ("dp=2, compiled", Choice(MeshSizes(dp=2), 2, 2, is_compiled=True), False),
        ("pp=2, 1F1B, compiled", Choice(MeshSizes(pp=2), 1, 8, "1F1B", is_compiled=True), False),
    ),
}
"""By the number of ranks: name, choice, whether with kernels; each rank has four sequences of a step."""
SEQUENCES_PER_RANK = 4


def llama_of(sizes: Sizes) -> LlamaSizes:
    """As the planner names them."""
    return LlamaSizes(sizes.dim, sizes.layers, sizes.heads, sizes.kv_heads, sizes.ffn, sizes.vocab)


class Part(Stage):
    """A stage, or with one stage the whole, of blocks whose attention and MLP are modules that `tp.plan_for` knows."""

    def __init__(self, sizes: Sizes, index: int, num_stages: int, *, recomputes: bool) -> None:
        super().__init__(sizes, index, num_stages, None)
        # As `split_blocks` cuts, and the planner does: a large head is worth some blocks.
        num_blocks = stages_of(llama_of(sizes), num_stages)[index].num_blocks
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(num_blocks))  # type: ignore[arg-type]
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


class Case:
    """A model on its mesh, and its step."""

    def __init__(self, sizes: Sizes, choice: Choice, device: torch.device, *, has_kernels: bool) -> None:
        self.sizes, self.choice, self.device, self.has_kernels = sizes, choice, device, has_kernels
        mesh = choice.mesh
        names = ("pp", "replicate", "dp", "tp")
        self.mesh = disttrain.init_device_mesh(
            device.type, (mesh.pp, mesh.replicate, mesh.dp, mesh.tp), mesh_dim_names=names
        )
        rows = sizes.num_sequences // mesh.num_batch_parts
        self.tokens = torch.randint(0, sizes.vocab, (rows, sizes.seq), device=device)
        # Ranks of one pipeline, and of tensor parallel, have the same rows.
        for axis in ("tp", "pp"):
            disttrain.broadcast(self.tokens, group=self.mesh[axis].get_group(), group_src=0)
        self.run: Callable[[], object]
        self.modules: list[Part] = []
        if choice.schedule is None:
            self._fit_out(0, 1)
            self.run = self._plain
        else:
            plan = make_schedule(choice.schedule, mesh.pp, choice.num_microbatches)
            group = self.mesh["pp"].get_group()
            made = [
                PipelineStage(self._fit_out(index, plan.num_stages), index, plan.num_stages, device, group=group)
                for index in plan.placement.stages[self.mesh.get_local_rank("pp")]
            ]
            schedule = PipelineSchedule(made, plan, self._loss)
            self.run = lambda: schedule.step(self.tokens, target=self.tokens, return_outputs=False)
        parameters = [parameter for module in self.modules for parameter in module.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def _fit_out(self, index: int, num_stages: int) -> Part:
        with torch.device("meta"):
            module = Part(self.sizes, index, num_stages, recomputes=self.choice.recomputes)
        if self.mesh["tp"].size() > 1:
            head_dim = self.sizes.dim // self.sizes.heads
            tp.parallelize_module(module, self.mesh["tp"], tp.plan_for(module, loss_parallel=True, head_dim=head_dim))
        if self.has_kernels:
            kernels.use_kernels(module, report=lambda _: None)
        shards = self.mesh["replicate", "dp"] if self.mesh["replicate"].size() > 1 else self.mesh["dp"]
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for block in module.blocks:
            fully_shard(block, mesh=shards, mp_policy=policy)
        fully_shard(module, mesh=shards, mp_policy=policy)
        if self.choice.is_compiled:
            compile_blocks(module, Block)
        module.to_empty(device=self.device)
        with torch.no_grad():
            for parameter in module.parameters():
                local = parameter.to_local()
                local.normal_(std=0.02) if parameter.ndim > 1 else local.fill_(1.0)
        self.modules.append(module)
        return module

    def _loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits, targets = logits.flatten(0, 1), targets.flatten()
        if self.mesh["tp"].size() > 1:
            return tp.vocab_parallel_cross_entropy(logits, targets, self.mesh["tp"], vocab_size=self.sizes.vocab)
        return F.cross_entropy(logits.float(), targets)

    def _plain(self) -> None:
        model = self.modules[0]
        for number, rows in enumerate(self.tokens.chunk(self.choice.num_microbatches)):
            is_last = number + 1 == self.choice.num_microbatches
            model.set_requires_gradient_sync(is_last or self.choice.reduces_each)
            if self.has_kernels and not self.choice.has_whole_logits:
                with kernels.loss_from_head(model.head, rows):
                    loss = model(rows)
            else:
                loss = self._loss(model(rows), rows)
            (loss / self.choice.num_microbatches).backward()

    def step(self) -> float:
        """Seconds of one training step on this rank, from a common start."""
        self._synchronize()
        disttrain.barrier()
        begin = time.perf_counter()
        self.run()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._synchronize()
        return time.perf_counter() - begin

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def largest(value: float) -> float:
    """Of all ranks'."""
    found = torch.tensor(value, dtype=torch.float64)
    disttrain.all_reduce(found, disttrain.ReduceOp.MAX)
    return found.item()


def measure(case: Case, num_steps: int, resting_bytes: int) -> dict[str, float]:
    """Collective. `resting_bytes` were there before the case."""
    for _ in range(NUM_WARMUPS):
        case.step()
    if case.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = [largest(case.step()) for _ in range(num_steps)]
    peak = torch.cuda.max_memory_allocated() - resting_bytes if case.device.type == "cuda" else 0
    return {"peak_gib": largest(peak) / GIB, "step_ms": 1e3 * statistics.median(times), "min_ms": 1e3 * min(times)}


def estimate(sizes: Sizes, choice: Choice, *, has_kernels: bool) -> dict[str, Any]:
    job = Job(
        llama_of(sizes),
        choice.mesh.num_gpus,
        HARDWARE["h200"],
        node_size=choice.mesh.num_gpus,
        seq_size=sizes.seq,
        num_sequences=sizes.num_sequences,
        has_kernels=has_kernels,
        may_compile=False,
        has_lean_loss=False,
    )
    plan = plan_of(job, choice)
    return {
        "peak_gib": plan.memory.total_bytes / GIB,
        "step_ms": 1e3 * plan.times.step_s,
        "when": plan.memory.when,
        "memory_gib": {name: size / GIB for name, size in plan.memory.by_part.items()},
        "times_ms": {name: 1e3 * seconds for name, seconds in plan.times.by_part.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in MODEL:
        parser.add_argument(f"--{name}", type=int, default=getattr(Sizes, name))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these cases alone")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device, shares_gpus = torch.device(args.device), False
    if device.type == "cuda":
        local_rank = int(os.environ["LOCAL_RANK"])
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        if shares_gpus := int(os.environ["LOCAL_WORLD_SIZE"]) > torch.cuda.device_count():
            # NCCL refuses two ranks of one host on one GPU.
            os.environ["NCCL_HOSTID"] = f"rank {local_rank}"
    disttrain.init_process_group()
    num_ranks = disttrain.get_world_size()
    num_gpus = min(num_ranks, torch.cuda.device_count())
    sizes = Sizes(**{name: getattr(args, name) for name in MODEL}, microbatches=SEQUENCES_PER_RANK * num_ranks)
    report: dict[str, Any] = {
        "command": asked(),
        "devices": f"{num_gpus} x {torch.cuda.get_device_name()}" if device.type == "cuda" else "CPU",
        "shares_gpus": shares_gpus,
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "sizes": vars(sizes),
        "cases": {},
    }
    for name, choice, has_kernels in CASES[num_ranks]:
        if args.only and name not in args.only:
            continue
        gc.collect()
        resting_bytes = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        case = Case(sizes, choice, device, has_kernels=has_kernels)
        measured = measure(case, args.steps, resting_bytes)
        if shares_gpus:
            measured = {"peak_gib": measured["peak_gib"]}
        del case
        expected = estimate(sizes, choice, has_kernels=has_kernels)
        report["cases"][name] = {
            "choice": asdict(choice),
            "has_kernels": has_kernels,
            "measured": measured,
            "estimated": expected,
        }
        if disttrain.get_rank() == 0:
            columns = (
                f"{key} {measured[key]:9.2f} {expected[key]:9.2f}" for key in ("peak_gib", "step_ms") if key in measured
            )
            print(f"{name:28s}", "  ".join(columns), flush=True)
            if args.out:
                keep(report, args.out)
    disttrain.destroy_process_group()


if __name__ == "__main__":
    main()
