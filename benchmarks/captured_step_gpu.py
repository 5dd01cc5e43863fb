"""A training step as one CUDA graph, against the same step as it is and against torch's, on a GPU, in turns.

    disttrain-launch --standalone --nproc-per-node 1 benchmarks/captured_step_gpu.py --out results.json

Shapes are those on which the host is the bound, and one where it is not. `busy` is the sum of the GPU's kernels in a
captured step: what no launching can go below. torch is captured by hand, with `capturable=True`.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed
from harness import Row, finish, in_turns, row, spread, table
from models.cases import WAYS, Case, synchronize
from models.model import Sizes

import disttrain
from disttrain.compiling import capture_step

SHAPES = {
    "dim 512, 24 layers, 4 x 256": (Sizes(dim=512, layers=24, heads=8, kv_heads=8, ffn=1408, vocab=8192, seq=256), 4),
    "dim 1024, 12 layers, 4 x 512": (
        Sizes(dim=1024, layers=12, heads=16, kv_heads=8, ffn=2816, vocab=8192, seq=512),
        4,
    ),
    "dim 2048, 4 layers, 2 x 2048": (
        Sizes(dim=2048, layers=4, heads=32, kv_heads=8, ffn=8192, vocab=32000, seq=2048),
        2,
    ),
}
NUM_WARMUPS = 5
NUM_IN_A_ROW = 10
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def main() -> None:
    options = _parser().parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    disttrain.init_process_group()
    torch.distributed.init_process_group("nccl")
    rows: list[Row] = []
    for name in options.shapes:
        rows += measured(name, options.rounds)
        if disttrain.get_rank() == 0:
            print(table(rows[-4:]), flush=True)
        gc.collect()
        torch.compiler.reset()
        torch.cuda.empty_cache()
    if disttrain.get_rank() == 0:
        finish(rows, options.out, machine=f"1 x {torch.cuda.get_device_name()}")
    torch.distributed.destroy_process_group()
    disttrain.destroy_process_group()


def measured(name: str, num_rounds: int) -> list[Row]:
    """Milliseconds of each side."""
    sizes, batch_size = SHAPES[name]
    random = torch.Generator().manual_seed(disttrain.get_rank())
    tokens = torch.randint(0, sizes.vocab, (batch_size, sizes.seq + 1), generator=random).cuda()
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    steps: dict[str, Step] = {}
    for way in ("torch compiled", "ours compiled", "kernels compiled"):
        steps[way] = Case("fsdp", WAYS[way], sizes, "cuda", 1e-4).whole_step
    by_hand = Case("fsdp", replace(WAYS["torch compiled"], is_capturable=True), sizes, "cuda", 1e-4)
    steps["torch captured"] = _captured_by_hand(by_hand.whole_step, batch)
    for way in ("ours compiled", "kernels compiled"):
        case = Case("fsdp", replace(WAYS[way], is_capturable=True), sizes, "cuda", 1e-4)
        steps[way.replace("compiled", "captured")] = capture_step(case.whole_step)
    taken = in_turns({side: _timed(step, batch, 1) for side, step in steps.items()}, num_rounds, NUM_WARMUPS)
    replays = {side: _timed(step, batch, NUM_IN_A_ROW) for side, step in steps.items() if "captured" in side}
    in_a_row = in_turns(replays, num_rounds)
    busy_ms = {side: _busy_ms(steps[side], batch) for side in ("ours captured", "kernels captured", "torch captured")}
    if disttrain.get_rank() == 0:
        print(f"{name}: busy " + ", ".join(f"{side} {ms:.2f} ms" for side, ms in busy_ms.items()), flush=True)
    return [
        row(f"{name}, as it is", "ms", _sides(taken, "compiled"), 1e3),
        row(f"{name}, captured", "ms", _sides(taken, "captured"), 1e3),
        row(f"{name}, captured, {NUM_IN_A_ROW} in a row", "ms", _sides(in_a_row, "captured"), 1e3),
        Row(f"{name}, busy", "ms", {side: spread([ms]) for side, ms in busy_ms.items()}),
    ]


def _sides(taken: dict[str, list[float]], how: str) -> dict[str, list[float]]:
    names = {"ours": f"kernels {how}", "torch": f"torch {how}", "ours, without kernels": f"ours {how}"}
    return {side: taken[name] for side, name in names.items()}


def _captured_by_hand(step: Step, batch: tuple[torch.Tensor, torch.Tensor]) -> Step:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(*batch)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    inputs = [tensor.clone() for tensor in batch]
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        loss = step(*inputs)

    def replay(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for own, given in zip(inputs, (tokens, targets), strict=True):
            own.copy_(given)
        graph.replay()
        return loss.clone()

    return replay


def _timed(step: Step, batch: tuple[torch.Tensor, torch.Tensor], num_steps: int) -> Callable[[], float]:
    """Seconds of a step, of so many between two waits of the host."""

    def call() -> float:
        synchronize()
        disttrain.barrier()
        begin = time.perf_counter()
        for _ in range(num_steps):
            step(*batch)
        synchronize()
        return (time.perf_counter() - begin) / num_steps

    return call


def _busy_ms(step: Step, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    """The sum of the kernels' times in a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(*batch)
        synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e3


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path)
    return parser


if __name__ == "__main__":
    main()
