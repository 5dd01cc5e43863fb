"""A model of experts trained on one GPU: ours, captured and not, beside torch's fully_shard with torch's operators.

    disttrain-launch --standalone --nproc-per-node 1 benchmarks/experts_model_gpu.py --out results.json

16 experts, two for each token, a billion active parameters of six. Parameters are kept in bf16. Each side is built,
measured and given up, twice in turns, since two don't fit on a GPU. `benchmarks/experts/reference.py` is torch's layer.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from harness import asked, keep
from models.cases import WAYS, Case, synchronize
from models.model import Sizes

import disttrain
from disttrain.compiling import capture_step

SIZES = Sizes(dim=2048, layers=16, heads=16, kv_heads=8, ffn=3072, vocab=32000, seq=4096, experts=16, top_k=2)
SIDES = {
    "torch": ("torch compiled", False),
    "ours": ("kernels compiled", False),
    "ours captured": ("kernels compiled", True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--layers", type=int, default=SIZES.layers)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    disttrain.init_process_group()
    torch.distributed.init_process_group("nccl")
    sizes = replace(SIZES, layers=options.layers)
    measured: dict[str, list[dict[str, Any]]] = {side: [] for side in options.sides}
    for _ in range(options.rounds):
        for side in options.sides:
            measured[side].append(_side(side, sizes, options.batch, options.steps))
            line = "  ".join(f"{name} {value:.2f}" for name, value in measured[side][-1].items())
            print(f"{side:16}{line}", flush=True)
            gc.collect()
            torch.cuda.empty_cache()
    if options.out:
        report = {"machine": f"1 x {torch.cuda.get_device_name()}", "command": asked(), "results": measured}
        keep({"torch_version": torch.__version__, **report}, options.out)
    torch.distributed.destroy_process_group()
    disttrain.destroy_process_group()


def _side(side: str, sizes: Sizes, batch_size: int, num_steps: int) -> dict[str, float]:
    """The median step in ms, memory in GiB, and the last loss."""
    way, is_captured = SIDES[side]
    case = Case("fsdp", replace(WAYS[way], keeps_in=torch.bfloat16, is_capturable=is_captured), sizes, "cuda", 1e-4)
    tokens = torch.randint(
        0, sizes.vocab, (batch_size, sizes.seq + 1), generator=torch.Generator().manual_seed(0)
    ).cuda()
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    step = capture_step(case.whole_step) if is_captured else case.whole_step
    for _ in range(5):
        loss = step(*batch)
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        loss = step(*batch)
        synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    peak = torch.cuda.max_memory_reserved() if is_captured else torch.cuda.max_memory_allocated()
    result = {
        "step_ms": statistics.median(times),
        "least_ms": min(times),
        "peak_gib": peak / 2**30,
        "loss": loss.item(),
    }
    del step, case, loss
    return result


if __name__ == "__main__":
    main()
