"""Pipelines against torch's own over the same Llama-shaped stages, on GPUs, in one run, interleaved.

    disttrain-launch --standalone --nproc-per-node gpu benchmarks/pipeline_gpu.py --out results.json

Each schedule is run with eager and with compiled blocks; within that the cases take turns: ours, ours with
`fuse_accumulation` ("fused"), that with disttrain.kernels in stages, loss and optimizer ("kernels"), ours with the
children of each OVERLAP one after the other ("in turns"), and torch. Times are those of the slowest rank, medians over
the rounds. TFLOP/s count what the model needs, over the whole step with its optimizer; the JSON says by which formula.
Peak memory is what PyTorch has allocated, less what the other models hold.

Ours is compared with its own simulation: F, I, W and B of each stage are measured alone, and a message between two
ranks. "bubble" is 1 - (sum of the measured times of a rank's actions) / (time of the step without optimizer), mean
over the ranks; "simulated" is the simulator's for the same times. With --profile, "idle" is the share of that time in
which no kernel ran, "twice" that in which two did, "moving" that in which NCCL or a copy was under way, and "hidden"
that in which it was while a kernel ran; by PyTorch's profiler, for all, NCCL's kernels not counted as kernels.

With --expert-ranks N and --experts-per-token K, N neighbouring ranks share the experts of their blocks, and each token
goes to K of them and comes back: that many pipelines run side by side, and nothing is averaged among them. NCCL carries
the tokens, or with --copied, for all but torch, copy engines.

On the CPU: --device cpu --dtype float32 and small sizes.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from harness import asked, keep
from pipelines.case import LIBRARIES, Case
from pipelines.model import FLOPS, Sizes
from pipelines.ranks import Ranks

import disttrain
from disttrain.pipelining import Schedule, lower, make_schedule, simulate

TIMES = ("step_ms", "without_optimizer_ms")
SHARES = ("idle", "twice", "moving", "hidden")


def on_all_ranks(values: Iterable[float], op: disttrain.ReduceOp = disttrain.ReduceOp.MAX) -> list[float]:
    """The largest of all ranks' values, one by one."""
    found = torch.tensor(list(values), dtype=torch.float64)
    disttrain.all_reduce(found, op)
    return found.tolist()


def of_each_rank(value: float) -> list[float]:
    mine = [value if rank == disttrain.get_rank() else 0.0 for rank in range(disttrain.get_world_size())]
    return on_all_ranks(mine, disttrain.ReduceOp.SUM)


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def row_of(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Collective."""
    size = disttrain.get_world_size()
    flops = args.sizes.flops * args.ranks.num_expert_ranks
    pipeline_s, step_s = (on_all_ranks(column) for column in zip(*case.times, strict=True))
    peaks = [peak / 2**30 for peak in of_each_rank(case.peak_bytes)]
    loss = sum(loss.item() for loss in case.losses) / case.plan.num_microbatches / args.ranks.num_expert_ranks
    row: dict[str, Any] = {
        "step_ms": spread([1e3 * seconds for seconds in step_s]),
        "without_optimizer_ms": spread([1e3 * seconds for seconds in pipeline_s]),
        "tflops_per_gpu": flops / size / statistics.median(step_s) / 1e12,
        "tflops_per_gpu_without_optimizer": flops / size / statistics.median(pipeline_s) / 1e12,
        "peak_gib": max(peaks),
        "peak_gib_of_ranks": peaks,
        "loss": sum(of_each_rank(loss)),
    }
    if case.costs is not None:
        timeline = simulate(lower(case.plan), case.costs)
        row["simulated"] = timeline.bubble
        row["simulated_ms"] = 1e3 * timeline.makespan_s
        row["bubble"] = 1 - sum(timeline.busy_s) / size / statistics.median(pipeline_s)
        row["costs"] = asdict(case.costs)
    return row


def make_cases(
    plan: Schedule, args: argparse.Namespace, *, is_compiled: bool
) -> tuple[dict[str, Case], dict[str, str]]:
    """Cases that run, and why the others don't."""
    cases: dict[str, Case] = {}
    refused: dict[str, str] = {}
    for library in args.libraries:
        try:
            cases[library] = Case(library, plan, args, is_compiled=is_compiled)
        except RuntimeError as error:
            # torch's zero-bubble schedules refuse compiled stages when they are made. Elsewhere it is a failure.
            if not (library == "torch" and is_compiled and "torch.compile" in str(error)):
                raise
            refused[library] = str(error)
    return cases, refused


def measure(plan: Schedule, args: argparse.Namespace, *, is_compiled: bool) -> dict[str, Any]:
    """By library. Collective."""
    cases, refused = make_cases(plan, args, is_compiled=is_compiled)
    for round_number in range(args.steps):
        for case in cases.values():
            case.step_with_peak() if round_number == args.steps - 1 else case.step()
    for library, case in cases.items():
        if library == "disttrain" and args.ranks.num_expert_ranks == 1:
            case.calibrate(args)
    rows: dict[str, Any] = {library: {"refused": reason} for library, reason in refused.items()}
    for library, case in cases.items():
        rows[library] = row_of(case, args)
        if args.profile:
            shares = case.use_of_device()
            rows[library] |= {f"{name}_of_ranks": of_each_rank(share) for name, share in shares.items()}
    for library in cases:
        if library != "torch" and "torch" in cases:
            rows[f"torch over {library}"] = ratios_of(rows["torch"], rows[library])
    return rows


def ratios_of(torchs: dict[str, Any], ours: dict[str, Any]) -> dict[str, float]:
    ratios = {key: torchs[key]["median"] / ours[key]["median"] for key in TIMES}
    return ratios | ({"peak_gib": torchs["peak_gib"] / ours["peak_gib"]} if ours["peak_gib"] else {})


def show(name: str, mode: str, rows: dict[str, Any]) -> None:
    for library, row in rows.items():
        head = f"{name:18}{mode:10}{library:11}"
        if "refused" in row:
            print(f"{head}refused: {row['refused']}")
        elif library.startswith("torch over"):
            print(f"{'':28}{library}: {', '.join(f'{key} {ratio:.3f}' for key, ratio in row.items())}")
        else:
            step, pipeline_ms = row["step_ms"], row["without_optimizer_ms"]["median"]
            line = f"{head}{step['median']:9.1f} [{step['min']:.1f}, {step['max']:.1f}]"
            line = f"{line:66}{pipeline_ms:9.1f}{row['tflops_per_gpu']:9.1f}{row['peak_gib']:9.2f}"
            if "bubble" in row:
                line += f"{100 * row['bubble']:9.2f}{100 * row['simulated']:10.2f}{row['simulated_ms']:9.1f}"
            if "idle_of_ranks" in row:
                shares = (100 * statistics.mean(row[f"{name}_of_ranks"]) for name in SHARES)
                line = f"{line:121}" + "".join(f"{share:9.2f}" for share in shares)
            print(line)


HEADING = (
    f"{'schedule':18}{'blocks':10}{'library':11}{'step ms [min, max]':27}{'no optim':>9}{'TFLOP/s':>9}{'GiB':>9}"
    f"{'bubble %':>9}{'simulated':>10}{'ms':>9}" + "".join(f"{f'{name} %':>9}" for name in SHARES)
)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Sizes):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    parser.add_argument("--schedules", nargs="+", default=["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
    parser.add_argument("--blocks", nargs="+", choices=["eager", "compiled"], default=["eager", "compiled"])
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=["disttrain", "fused", "torch"])
    parser.add_argument("--expert-ranks", type=int, default=1, help="how many ranks share their blocks' experts")
    parser.add_argument("--one-group", action="store_true", help="all of a rank's stages exchange over one group")
    parser.add_argument("--copied", action="store_true", help="copy engines carry the exchanges of ours, not NCCL")
    parser.add_argument("--steps", type=int, default=6, help="rounds that count, after two that do not")
    parser.add_argument("--calibration-runs", type=int, default=6)
    parser.add_argument("--profile", action="store_true", help="one more step of each, under PyTorch's profiler")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if (args.expert_ranks > 1) != bool(args.experts_per_token):
        parser.error("--expert-ranks and --experts-per-token come together")
    if args.profile and args.device == "cpu":
        parser.error("--profile looks at a GPU's kernels")
    args.sizes = Sizes(**{field.name: getattr(args, field.name) for field in fields(Sizes)})
    return args


def make_ranks(args: argparse.Namespace) -> Ranks:
    """Collective."""
    sizes = args.sizes
    num_tokens = sizes.microbatch_size * sizes.seq * sizes.experts_per_token
    part_bytes = num_tokens * sizes.dim * getattr(torch, args.dtype).itemsize // args.expert_ranks
    copied_bytes = part_bytes if args.copied else 0
    return Ranks(args.expert_ranks, args.torch_device, one_group=args.one_group, copied_bytes=copied_bytes)


def report_of(args: argparse.Namespace) -> dict[str, Any]:
    is_cuda = args.device == "cuda"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "command": asked(),
        "commit": commit.stdout.strip(),
        "versions": f"disttrain {disttrain.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "devices": f"{disttrain.get_world_size()} x {torch.cuda.get_device_name() if is_cuda else 'CPU'}",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if is_cuda else None,
        "sizes": asdict(args.sizes),
        "dtype": args.dtype,
        "flops": FLOPS,
        "results": {},
    }


def main() -> None:
    args = parsed()
    args.torch_device = torch.device(args.device)
    if args.device == "cuda":
        args.torch_device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(args.torch_device)
    disttrain.init_process_group()
    torch.distributed.init_process_group("nccl" if args.device == "cuda" else "gloo")
    torch.manual_seed(0)
    args.tokens = torch.randint(0, args.vocab, (args.sizes.num_sequences, args.seq)).to(args.torch_device)
    if args.device == "cuda":
        # What cuBLAS keeps for itself shall not count as the first case's, on neither thread.
        torch.ones(8, 8, device="cuda", requires_grad=True).mm(torch.ones(8, 8, device="cuda")).sum().backward()
    args.ranks = make_ranks(args)
    report, is_first = report_of(args), disttrain.get_rank() == 0
    if is_first:
        print(HEADING, flush=True)
    for name in args.schedules:
        plan = make_schedule(name, args.ranks.pipeline_size, args.microbatches)
        for mode in args.blocks:
            rows = report["results"].setdefault(name, {})[mode] = measure(plan, args, is_compiled=mode == "compiled")
            # Two models lie there already: the next two need their room.
            gc.collect()
            torch.compiler.reset()
            if args.device == "cuda":
                torch.cuda.empty_cache()
            if is_first:
                show(name, mode, rows)
                sys.stdout.flush()
                if args.out:
                    # After each: a run that is cut short leaves what it has.
                    keep(report, args.out)
    torch.distributed.destroy_process_group()
    disttrain.destroy_process_group()


if __name__ == "__main__":
    main()
