"""Pipelines against torch's own over the same Llama-shaped stages, on GPUs, in one run, interleaved.

    disttrain-launch --standalone --nproc-per-node gpu benchmarks/pipeline_gpu.py --out results.json

Each schedule is run with eager and with compiled blocks; within that, ours, ours with `fuse_accumulation` ("fused") and
torch take turns. Times are those of the slowest rank, medians over the rounds. TFLOP/s count what the model needs, over
the whole step with its optimizer; the JSON says by which formula. Peak memory is what PyTorch has allocated, less what
the other models hold.

Ours is compared with its own simulation: F, I, W and B of each stage are measured alone, and a message between two
ranks. "bubble" is 1 - (sum of the measured times of a rank's actions) / (time of the step without optimizer), mean
over the ranks; "simulated" is the simulator's for the same times. With --profile, "idle" is the share of that time in
which no kernel ran but NCCL's, by PyTorch's profiler, for both.

On the CPU: --device cpu --dtype float32 and small sizes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from pipelines.calibration import measure_costs
from pipelines.model import FLOPS, Sizes, loss_of, make_stage
from torch.distributed import pipelining as torch_pipelining
from torch.distributed.pipelining import schedules as torch_schedules

import disttrain
from disttrain import pipelining
from disttrain.pipelining import Op, Schedule, lower, make_schedule, simulate, split_layers

ONE_STAGE = {"GPipe", "1F1B"}
TIMES = ("step_ms", "without_optimizer_ms")
NUM_WARMUPS = 2
LIBRARIES = ["disttrain", "fused", "torch"]


def has_weight_actions(plan: Schedule) -> bool:
    """Whether backward comes in two parts anywhere."""
    every = (part for actions in plan.ranks for action in actions for part in action.parts)
    return any(part.op is Op.BACKWARD_WEIGHT for part in every)


class Case:
    """This rank's stages, a schedule of one of the two libraries over them, and an optimizer.

    Raises: RuntimeError, alike on all ranks, when the library refuses the schedule.
    """

    def __init__(self, library: str, plan: Schedule, args: argparse.Namespace, *, is_compiled: bool) -> None:
        self.device = args.torch_device
        self.plan = plan
        before = self._allocated_bytes()
        self.stages = {
            index: make_stage(args.sizes, index, plan.num_stages, self.device, getattr(torch, args.dtype))
            for index in plan.placement.stages[disttrain.get_rank()]
        }
        for stage in self.stages.values():
            if library != "torch" and has_weight_actions(plan):
                split_layers(stage)
            if is_compiled:
                stage.compile_blocks()
        self.schedule = self._schedule(library)
        parameters = [parameter for stage in self.stages.values() for parameter in stage.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
        self.losses: list[torch.Tensor] = []
        self.times: list[tuple[float, float]] = []
        self.peak_bytes = 0
        self.costs: pipelining.Costs | None = None
        tokens = args.tokens
        self.args = (tokens,) if 0 in self.stages else ()
        self.target = tokens if plan.num_stages - 1 in self.stages else None
        for _ in range(NUM_WARMUPS):
            self.step()
        self.times.clear()
        # With the buffers for messages that a library keeps between steps.
        self.resting_bytes = self._allocated_bytes() - before

    def _schedule(self, library: str) -> Any:
        options = {}
        if library == "torch":
            stage_class = torch_pipelining.PipelineStage
            schedule_class = torch_schedules.get_schedule_class(self.plan.name)
        else:
            stage_class, schedule_class = pipelining.PipelineStage, pipelining.get_schedule_class(self.plan.name)
            options = {"fuse_accumulation": library == "fused"}
        made = [stage_class(stage, index, self.plan.num_stages, self.device) for index, stage in self.stages.items()]
        stages = made[0] if self.plan.name in ONE_STAGE else made
        return schedule_class(stages, self.plan.num_microbatches, loss_fn=loss_of, **options)

    def forward_and_backward(self) -> float:
        """Seconds of the schedule on this rank, from a common start."""
        self.losses.clear()
        self._synchronize()
        disttrain.barrier()
        begin = time.perf_counter()
        self.schedule.step(*self.args, target=self.target, losses=self.losses, return_outputs=False)
        self._synchronize()
        return time.perf_counter() - begin

    def step(self) -> None:
        """One training step."""
        pipeline_s = self.forward_and_backward()
        begin = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._synchronize()
        self.times.append((pipeline_s, pipeline_s + time.perf_counter() - begin))

    def step_with_peak(self) -> None:
        if self.device.type == "cuda":
            others_bytes = self._allocated_bytes() - self.resting_bytes
            torch.cuda.reset_peak_memory_stats()
            self.step()
            self.peak_bytes = torch.cuda.max_memory_allocated() - others_bytes
        else:
            self.step()

    def calibrate(self, args: argparse.Namespace) -> None:
        """Collective."""
        self.costs = measure_costs(
            self.stages,
            self.plan.num_stages,
            args.sizes,
            args.tokens[: args.sizes.microbatch_size],
            is_split=has_weight_actions(self.plan),
            num_runs=args.calibration_runs,
        )
        self.optimizer.zero_grad()

    def idle(self) -> float:
        """The share of a step without optimizer in which no kernel of this rank's ran but NCCL's; 1: none was seen."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            pipeline_s = self.forward_and_backward()
        self.optimizer.zero_grad()
        kernels = [
            event.time_range
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
            and not event.is_user_annotation
            and "nccl" not in event.name.lower()
        ]
        busy_us, end_us = 0.0, float("-inf")
        for kernel in sorted(kernels, key=lambda kernel: kernel.start):
            busy_us += max(0.0, kernel.end - max(end_us, kernel.start))
            end_us = max(end_us, kernel.end)
        return 1 - busy_us / 1e6 / pipeline_s

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _allocated_bytes(self) -> int:
        gc.collect()
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0


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


def row_of(case: Case, sizes: Sizes) -> dict[str, Any]:
    """Collective."""
    size = disttrain.get_world_size()
    pipeline_s, step_s = (on_all_ranks(column) for column in zip(*case.times, strict=True))
    peaks = [peak / 2**30 for peak in of_each_rank(case.peak_bytes)]
    loss = sum(loss.item() for loss in case.losses) / case.plan.num_microbatches
    row: dict[str, Any] = {
        "step_ms": spread([1e3 * seconds for seconds in step_s]),
        "without_optimizer_ms": spread([1e3 * seconds for seconds in pipeline_s]),
        "tflops_per_gpu": sizes.flops / size / statistics.median(step_s) / 1e12,
        "tflops_per_gpu_without_optimizer": sizes.flops / size / statistics.median(pipeline_s) / 1e12,
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
        if library == "disttrain":
            case.calibrate(args)
    rows: dict[str, Any] = {library: {"refused": reason} for library, reason in refused.items()}
    for library, case in cases.items():
        rows[library] = row_of(case, args.sizes)
        if args.profile:
            rows[library]["idle_of_ranks"] = of_each_rank(case.idle())
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
                line = f"{line:121}{100 * statistics.mean(row['idle_of_ranks']):8.2f}"
            print(line)


HEADING = (
    f"{'schedule':18}{'blocks':10}{'library':11}{'step ms [min, max]':27}{'no optim':>9}{'TFLOP/s':>9}{'GiB':>9}"
    f"{'bubble %':>9}{'simulated':>10}{'ms':>9}{'idle %':>8}"
)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Sizes):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    parser.add_argument("--schedules", nargs="+", default=["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
    parser.add_argument("--blocks", nargs="+", choices=["eager", "compiled"], default=["eager", "compiled"])
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=LIBRARIES)
    parser.add_argument("--steps", type=int, default=6, help="rounds that count, after two that do not")
    parser.add_argument("--calibration-runs", type=int, default=6)
    parser.add_argument("--profile", action="store_true", help="one more step of each, under PyTorch's profiler")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.profile and args.device == "cpu":
        parser.error("--profile looks at a GPU's kernels")
    args.sizes = Sizes(**{field.name: getattr(args, field.name) for field in fields(Sizes)})
    return args


def report_of(args: argparse.Namespace) -> dict[str, Any]:
    is_cuda = args.device == "cuda"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "command": " ".join(sys.argv),
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
    report, is_first = report_of(args), disttrain.get_rank() == 0
    if is_first:
        print(HEADING, flush=True)
    for name in args.schedules:
        plan = make_schedule(name, disttrain.get_world_size(), args.microbatches)
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
                    args.out.write_text(json.dumps(report, indent=1))
    torch.distributed.destroy_process_group()
    disttrain.destroy_process_group()


if __name__ == "__main__":
    main()
