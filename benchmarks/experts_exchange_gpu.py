"""A layer of experts over the GPUs of a host, by each way to exchange rows, beside one of torch's own operators.

    disttrain-launch --standalone --nproc-per-node 2 benchmarks/experts_exchange_gpu.py --out results.json

Forward and backward of 16,384 tokens on each rank, in turns; the reference is `benchmarks/experts/reference.py`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from experts import reference
from harness import asked, keep

import disttrain
from disttrain.experts import Experts, shard_experts

NUM_EXPERTS, TOP_K, DIM, HIDDEN = 64, 8, 2048, 1408
WAYS = ("all_to_all", "padded", "peers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    disttrain.init_process_group()
    torch.distributed.init_process_group("nccl")
    size, rank = disttrain.get_world_size(), disttrain.get_rank()
    mesh = disttrain.init_device_mesh("cuda", (size,), mesh_dim_names=("ep",))
    torch.manual_seed(rank)
    bf16: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(options.tokens, DIM, **bf16, requires_grad=True)
    weights, indices = torch.randn(options.tokens, NUM_EXPERTS, device="cuda").softmax(-1).topk(TOP_K)
    weights.requires_grad_()
    wish = torch.randn_like(x)
    steps: dict[str, Callable[[], object]] = {}
    for way in WAYS:
        layer = Experts(NUM_EXPERTS, DIM, HIDDEN, **bf16)
        shard_experts(layer, mesh, exchange=way, src_data_rank=None)
        leaves = [x, weights, *layer.parameters()]
        steps[way] = lambda layer=layer, leaves=leaves: torch.autograd.grad(layer(x, indices, weights), leaves, wish)
    local = NUM_EXPERTS // size
    own = [torch.randn(local, *shape, **bf16) * 0.02 for shape in ((HIDDEN, DIM), (HIDDEN, DIM), (DIM, HIDDEN))]
    own = [weight.requires_grad_() for weight in own]
    group = torch.distributed.group.WORLD
    steps["torch"] = lambda: torch.autograd.grad(
        reference.mixture_over(x, indices, weights, *own, group), [x, weights, *own], wish
    )
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(options.rounds + 3):
        for name, step in steps.items():
            torch.cuda.synchronize()
            disttrain.barrier()
            begin = time.perf_counter()
            step()
            torch.cuda.synchronize()
            if number >= 3:
                times[name].append(1e3 * (time.perf_counter() - begin))
    results = {name: {"ms": statistics.median(series), "least_ms": min(series)} for name, series in times.items()}
    if rank == 0:
        for name, result in results.items():
            print(f"{name:12}{result['ms']:8.2f} ms, least {result['least_ms']:.2f}", flush=True)
        if options.out:
            machine = f"{size} x {torch.cuda.get_device_name()}"
            keep(
                {"machine": machine, "command": asked(), "arguments": vars(options) | {"out": ""}, "results": results},
                options.out,
            )
    torch.distributed.destroy_process_group()
    disttrain.destroy_process_group()


if __name__ == "__main__":
    main()
