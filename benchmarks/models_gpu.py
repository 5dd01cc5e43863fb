"""A whole model trained by torch's library, by ours, and with kernels, on GPUs, in one run, interleaved.

    disttrain-launch --standalone --nproc-per-node 4 benchmarks/models_gpu.py fsdp tp 2d --out results.json

Prints step time, tokens per second and GPU, peak memory, and what they are against the best of torch's; with --profile
also what a step's time goes to. The losses of all steps are in the JSON: all ways begin with the same parameters. On
the CPU: --device cpu --preset tiny.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from harness import asked, keep
from models.cases import MESHES, PARALLELISMS, WAYS, Case, ranks_per_batch, synchronize
from models.kinds import longest, spans_of, times_by_kind
from models.model import Sizes

import disttrain

PRESETS = {
    "large": Sizes(),
    "small": Sizes(dim=512, layers=4, heads=8, kv_heads=4, ffn=1408, vocab=4096, seq=512),
    "tiny": Sizes(dim=64, layers=2, heads=8, kv_heads=4, ffn=96, vocab=320, seq=32),
}
NUM_FOLLOWERS = 8
"""Of each token; one of them comes next, so there is something to learn."""
STARTED = time.perf_counter()
NUM_WARMUPS = 2
DEFAULT_WAYS = ["torch compiled", "ours compiled", "kernels compiled"]


def main() -> None:
    options = _parser().parse_args()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    disttrain.init_process_group()
    torch.distributed.init_process_group("nccl" if options.device == "cuda" else "gloo")
    results = {}
    for parallelism in options.parallelisms:
        if parallelism in MESHES and disttrain.get_world_size() < 4:
            print(f"{parallelism}: left out, since there are less than two pairs of ranks", flush=True)
            continue
        rows = measured(parallelism, options)
        results[parallelism] = rows
        if disttrain.get_rank() == 0:
            _print(parallelism, rows)
            if options.out:
                keep(_report(options, results), options.out)
        gc.collect()
        torch.compiler.reset()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    torch.distributed.destroy_process_group()
    disttrain.destroy_process_group()


def measured(parallelism: str, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By way, what is printed of it."""
    sizes = _sizes(options)
    ways = [name for name in options.ways if not ("logits" in name and parallelism in ("fsdp", "hsdp"))]
    batches = _batches(parallelism, options, sizes)
    cases = {}
    for name in ways:
        if _slowest(time.perf_counter() - STARTED) > options.patience:
            continue
        case = Case(parallelism, WAYS[name], sizes, options.device, options.lr)
        try:
            case.step(*batches[0])
        except Exception as error:
            # What torch's library cannot do shall not cost the rest.
            if WAYS[name].is_ours:
                raise
            print(f"{parallelism}, {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        cases[name] = case
        if disttrain.get_rank() == 0:
            print(f"{parallelism}, {name}: ready after {time.perf_counter() - STARTED:.0f} s", flush=True)
    times: dict[str, list[float]] = {name: [] for name in cases}
    losses: dict[str, list[float]] = {name: [] for name in cases}
    for round_number in range(options.steps + NUM_WARMUPS):
        for name, case in cases.items():
            seconds, loss = case.step(*batches[round_number % len(batches)])
            losses[name].append(loss.item())
            if round_number >= NUM_WARMUPS:
                times[name].append(seconds)
    rows: dict[str, dict[str, Any]] = {}
    resting = sum(case.resting_bytes for case in cases.values())
    num_tokens = options.batch * sizes.seq / ranks_per_batch(parallelism)
    for name, case in cases.items():
        seconds = _slowest(statistics.median(times[name]))
        rows[name] = {
            "step_ms": 1e3 * seconds,
            "min_ms": 1e3 * _slowest(min(times[name])),
            "tokens_per_s_gpu": num_tokens / seconds,
            "tflops_gpu": sizes.flops(1) * num_tokens / seconds / 1e12,
            "peak_gib": _slowest(_peak_bytes(case, batches[0]) - resting + case.resting_bytes) / 2**30,
            "losses": losses[name],
        }
        if name in (options.profile or ()) and _slowest(time.perf_counter() - STARTED) < 1.6 * options.patience:
            rows[name] |= _profiled(case, batches[0])
    best = max((rows[name]["tokens_per_s_gpu"] for name in rows if name.startswith("torch")), default=float("nan"))
    for row in rows.values():
        row["of_torch"] = row["tokens_per_s_gpu"] / best
    return rows


def _sizes(options: argparse.Namespace) -> Sizes:
    preset = PRESETS[options.preset]
    return replace(preset, layers=options.layers or preset.layers)


def _batches(parallelism: str, options: argparse.Namespace, sizes: Sizes) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same for all ranks that share a batch."""
    place = disttrain.get_rank() // ranks_per_batch(parallelism)
    followers = torch.randint(0, sizes.vocab, (sizes.vocab, NUM_FOLLOWERS), generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(1 + place)
    chosen = torch.randint(0, NUM_FOLLOWERS, (sizes.seq, options.batches, options.batch), generator=random)
    tokens = [torch.randint(0, sizes.vocab, chosen.shape[1:], generator=random)]
    for choice in chosen:
        tokens.append(followers[tokens[-1], choice])
    drawn = torch.stack(tokens, dim=-1).to(options.device)
    return [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in drawn]


def _peak_bytes(case: Case, batch: tuple[torch.Tensor, torch.Tensor]) -> int:
    """Of one step, with all that is there besides; 0 on CPUs, where nobody counts."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.reset_peak_memory_stats()
    case.step(*batch)
    return torch.cuda.max_memory_allocated()


def _profiled(case: Case, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
    with torch.profiler.profile() as profile:
        case.step(*batch)
        synchronize()
    spans = spans_of(profile)
    return {"ms_by_kind": times_by_kind(spans), "longest": longest(spans, 24)} if spans else {}


def _slowest(value: float) -> float:
    """The largest of all ranks' values."""
    largest = torch.tensor(value, dtype=torch.float64)
    disttrain.all_reduce(largest, disttrain.ReduceOp.MAX)
    return largest.item()


def _print(parallelism: str, rows: dict[str, dict[str, Any]]) -> None:
    shown = ("step_ms", "min_ms", "tokens_per_s_gpu", "tflops_gpu", "peak_gib", "of_torch")
    print(f"{parallelism:32}" + "".join(f"{name:>18}" for name in shown) + f"{'last loss':>18}")
    for name, row in rows.items():
        print(f"  {name:30}" + "".join(f"{row[key]:18.3f}" for key in shown) + f"{row['losses'][-1]:18.4f}")
    for name, row in rows.items():
        if "ms_by_kind" in row:
            kinds = sorted(row["ms_by_kind"].items(), key=lambda item: -item[1])
            print(f"  {name}: " + ", ".join(f"{kind} {ms:.1f} ms" for kind, ms in kinds))
            for kernel, ms, count in row["longest"]:
                print(f"    {ms:8.2f} ms {count:5}  {kernel}")
    sys.stdout.flush()


def _report(options: argparse.Namespace, results: dict[str, Any]) -> dict[str, Any]:
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    return {
        "torch_version": torch.__version__,
        "topology": f"one node, {disttrain.get_world_size()} x {device}",
        "command": asked(),
        "sizes": asdict(_sizes(options)) | {"batch": options.batch},
        "results": results,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parallelisms", nargs="*", default=list(PARALLELISMS), metavar="|".join(PARALLELISMS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=DEFAULT_WAYS)
    parser.add_argument("--profile", nargs="*", choices=WAYS, help="of these ways, what a step's time goes to")
    parser.add_argument("--preset", choices=PRESETS, default="large")
    parser.add_argument("--layers", type=int, help="in place of the preset's")
    parser.add_argument("--batch", type=int, default=2, help="sequences of a rank, or of ranks that share a model")
    parser.add_argument("--batches", type=int, default=4, help="steps go through so many, again and again")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--patience", type=float, default=1e9, help="after so many seconds no other way is begun with")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path)
    return parser


if __name__ == "__main__":
    main()
