"""One library's pipeline on this rank: stages, a schedule over them and an optimizer, to take turns with others."""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from pipelines.calibration import measure_costs
from pipelines.model import Stage, loss_of, make_stage
from torch.distributed import pipelining as torch_pipelining
from torch.distributed.pipelining import schedules as torch_schedules

import disttrain
from disttrain import kernels, pipelining
from disttrain.pipelining import Op, PipelineSchedule, Schedule, split_layers

LIBRARIES = ("disttrain", "fused", "kernels", "in turns", "torch")
_ONE_STAGE = {"GPipe", "1F1B"}
_NUM_WARMUPS = 2


def has_weight_actions(plan: Schedule) -> bool:
    """Whether backward comes in two parts anywhere."""
    every = (part for actions in plan.ranks for action in actions for part in action.parts)
    return any(part.op is Op.BACKWARD_WEIGHT for part in every)


def one_by_one(plan: Schedule) -> Schedule:
    """The same with the children of an OVERLAP one after the other."""
    ranks = tuple(tuple(part for action in actions for part in action.parts) for actions in plan.ranks)
    return replace(plan, ranks=ranks)


def loss_of_hidden(stage: Stage, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """`loss_of` the logits that the stage's head would make of `hidden`, without them."""
    assert stage.head is not None
    return kernels.linear_cross_entropy(hidden.flatten(0, 1), stage.head.weight, tokens.flatten())


class Case:
    """This rank's stages, a schedule of one of the two libraries over them, and an optimizer.

    Raises: RuntimeError, alike on all ranks, when the library refuses the schedule.
    """

    def __init__(self, library: str, plan: Schedule, args: argparse.Namespace, *, is_compiled: bool) -> None:
        self.device = args.torch_device
        self.plan = plan
        before = self._allocated_bytes()
        self.stages = {
            index: make_stage(
                args.sizes,
                index,
                plan.num_stages,
                self.device,
                getattr(torch, args.dtype),
                args.ranks.exchange(library, place),
            )
            for place, index in enumerate(plan.placement.stages[args.ranks.pipeline_rank])
        }
        for stage in self.stages.values():
            if library == "kernels":
                kernels.use_kernels(stage, report=lambda _: None)
                stage.gives_hidden = True
            if library != "torch" and has_weight_actions(plan):
                split_layers(stage)
            if is_compiled:
                stage.compile_blocks()
        self.schedule = self._schedule(library, args)
        parameters = [parameter for stage in self.stages.values() for parameter in stage.parameters()]
        self.optimizer: torch.optim.Optimizer
        if library == "kernels":
            # As torch's has them: averages in the parameters' dtype, and no other copy of these.
            self.optimizer = kernels.AdamW(parameters, lr=1e-4, state_dtype=parameters[0].dtype, keep_master=False)
        else:
            self.optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
        self.losses: list[torch.Tensor] = []
        self.times: list[tuple[float, float]] = []
        self.peak_bytes = 0
        self.costs: pipelining.Costs | None = None
        tokens = args.tokens
        self.args = (tokens,) if 0 in self.stages else ()
        self.target = tokens if plan.num_stages - 1 in self.stages else None
        for _ in range(_NUM_WARMUPS):
            self.step()
        self.times.clear()
        # With the buffers for messages that a library keeps between steps.
        self.resting_bytes = self._allocated_bytes() - before

    def _schedule(self, library: str, args: argparse.Namespace) -> Any:
        num_stages, num_microbatches = self.plan.num_stages, self.plan.num_microbatches
        if library == "torch":
            stage_class = torch_pipelining.PipelineStage
            made = partial(torch_schedules.get_schedule_class(self.plan.name), loss_fn=loss_of)
        else:
            stage_class = pipelining.PipelineStage
            last = self.stages.get(num_stages - 1)
            made = partial(
                pipelining.get_schedule_class(self.plan.name),
                loss_fn=partial(loss_of_hidden, last) if library == "kernels" else loss_of,
                fuse_accumulation=library in ("fused", "kernels"),
            )
        group = args.ranks.pipeline_groups["torch" if library == "torch" else "ours"]
        stages = [
            stage_class(stage, index, num_stages, self.device, group=group) for index, stage in self.stages.items()
        ]
        if library == "in turns":
            return PipelineSchedule(stages, one_by_one(self.plan), loss_of)
        return made(stages[0] if self.plan.name in _ONE_STAGE else stages, num_microbatches)

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

    def use_of_device(self) -> dict[str, float]:
        """Shares of a step without optimizer: "idle", no kernel of this rank's ran; "twice", two did; "moving", a copy
        or a kernel of NCCL's was under way; "hidden", one was, and a kernel ran.
        """
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            pipeline_s = self.forward_and_backward()
        self.optimizer.zero_grad()
        marks: list[tuple[float, int, int]] = []
        for event in profile.events():
            name = event.name.lower()
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
                is_move = name.startswith("memcpy") or "nccl" in name
                step = (0, 1) if is_move else (int(not name.startswith("memset")), 0)
                marks.append((event.time_range.start, *step))
                marks.append((event.time_range.end, -step[0], -step[1]))
        spent_us = dict.fromkeys(("busy", "twice", "moving", "hidden"), 0.0)
        running = moving = 0
        since_us = 0.0
        for time_us, change, moves in sorted(marks):
            under_way = {"busy": running, "twice": running > 1, "moving": moving, "hidden": running and moving}
            for name in (name for name, is_under_way in under_way.items() if is_under_way):
                spent_us[name] += time_us - since_us
            running, moving, since_us = running + change, moving + moves, time_us
        shares = {name: us / 1e6 / pipeline_s for name, us in spent_us.items()}
        return {"idle": 1 - shares.pop("busy"), **shares}

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _allocated_bytes(self) -> int:
        gc.collect()
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0
