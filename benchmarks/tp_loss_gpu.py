"""The vocabulary-parallel loss against torch's ways to one, on GPUs, forward and backward, in one run, interleaved.

    disttrain-launch --standalone --nproc-per-node 2 benchmarks/tp_loss_gpu.py --out results.json

Every case begins with bf16 logits whose classes are cut over all ranks, and ends with their gradient. Prints the
median time of the slowest rank, peak memory above the logits, and for the time the bytes that have to be moved (logits
read twice, gradient written once) per second.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel as torch_loss_parallel

import disttrain
from disttrain.tp.loss.vocab_parallel import vocab_parallel_cross_entropy

WARM_UP = 3
Case = Callable[[torch.Tensor, torch.Tensor], None]


def cases(vocab: int) -> dict[str, Case]:
    """Each leaves the gradient of its first argument, this rank's logits."""
    mesh = init_device_mesh("cuda", (disttrain.get_world_size(),))

    def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return vocab_parallel_cross_entropy(logits, target, vocab_size=vocab)

    compiled_loss_of = torch.compile(loss_of, fullgraph=True)

    def ours(logits: torch.Tensor, target: torch.Tensor) -> None:
        loss_of(logits, target).backward()

    def ours_compiled(logits: torch.Tensor, target: torch.Tensor) -> None:
        compiled_loss_of(logits, target).backward()

    def torch_parallel(logits: torch.Tensor, target: torch.Tensor) -> None:
        with torch_loss_parallel():
            F.cross_entropy(DTensor.from_local(logits, mesh, [Shard(1)]), target).backward()

    def torch_gathered(logits: torch.Tensor, target: torch.Tensor) -> None:
        F.cross_entropy(DTensor.from_local(logits, mesh, [Shard(1)]).full_tensor(), target).backward()

    def torch_gathered_fp32(logits: torch.Tensor, target: torch.Tensor) -> None:
        F.cross_entropy(DTensor.from_local(logits, mesh, [Shard(1)]).full_tensor().float(), target).backward()

    return {
        "disttrain": ours,
        "disttrain compiled": ours_compiled,
        "torch loss_parallel": torch_parallel,
        "torch gathered": torch_gathered,
        "torch gathered fp32": torch_gathered_fp32,
    }


def step(case: Case, logits: torch.Tensor, target: torch.Tensor) -> float:
    """Seconds on this rank, from a common start."""
    logits.grad = None
    torch.cuda.synchronize()
    disttrain.barrier()
    begin = time.perf_counter()
    case(logits, target)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def peak_mib(case: Case, logits: torch.Tensor, target: torch.Tensor) -> float:
    logits.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    case(logits, target)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def slowest(seconds: float) -> float:
    """The largest of all ranks' values."""
    value = torch.tensor(seconds, dtype=torch.float64)
    disttrain.all_reduce(value, disttrain.ReduceOp.MAX)
    return value.item()


def measured(num_tokens: int, vocab: int, num_steps: int) -> dict[str, dict[str, float]]:
    """By case, what is printed of it."""
    num_own = vocab // disttrain.get_world_size()
    logits = torch.randn(num_tokens, num_own, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, vocab, (num_tokens,), generator=torch.Generator().manual_seed(0)).cuda()
    by_name = cases(vocab)
    times: dict[str, list[float]] = {name: [] for name in by_name}
    for round_number in range(num_steps + WARM_UP):
        for name, case in by_name.items():
            elapsed = step(case, logits, target)
            if round_number >= WARM_UP:
                times[name].append(elapsed)
    rows = {}
    for name, case in by_name.items():
        seconds = slowest(statistics.median(times[name]))
        rows[name] = {
            "ms": 1e3 * seconds,
            "min_ms": 1e3 * slowest(min(times[name])),
            "gb_per_s": 3 * logits.nbytes / seconds / 1e9,
            "peak_mib": slowest(peak_mib(case, logits, target)),
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--vocab", type=int, nargs="+", default=[32000, 128256], help="multiples of the ranks")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    disttrain.init_process_group()
    torch.distributed.init_process_group("nccl")
    results = []
    for vocab in args.vocab:
        for num_tokens in args.tokens:
            rows = measured(num_tokens, vocab, args.steps)
            torch.cuda.empty_cache()
            results.append({"tokens": num_tokens, "vocab": vocab, "cases": rows})
            if disttrain.get_rank() == 0:
                print(f"{num_tokens} tokens, {vocab} classes")
                for name, row in rows.items():
                    print(f"  {name:20s}", "  ".join(f"{key} {value:10.3f}" for key, value in row.items()))
    if disttrain.get_rank() == 0 and args.out:
        settings = flags_of(args)
        gpus = f"{disttrain.get_world_size()} x {torch.cuda.get_device_name()}"
        report = {"torch_version": torch.__version__, "gpus": gpus, "arguments": settings, "results": results}
        keep(report, args.out)
    torch.distributed.destroy_process_group()
    disttrain.destroy_process_group()


if __name__ == "__main__":
    main()
