"""What a pipeline's scheduler costs the host per action: ours and torch's in turn, two processes, over Gloo.

    disttrain-launch --standalone --nproc-per-node 2 benchmarks/pipeline_host.py [--rounds 20] [--json FILE]

Stages multiply by one weight of one element, so there is nothing to compute. An action's cost is (a step - the same
forwards and backwards in a plain loop) / (actions of this rank, messages included, as our schedule lists them), of the
costlier rank; each runtime's plain loop has its own backward in two parts. "cpu" counts the time that the rank's own
thread computes, which is the scheduler's and that of handing messages over; "wall" also its waiting for them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from harness import OURS, TORCH, Row, Spread, command_line, finish
from torch import nn
from torch.distributed import pipelining as torch_pipelining
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import disttrain
from disttrain import pipelining
from disttrain.pipelining import Action, Backward, Op, Schedule, lower, make_schedule

ONE_STAGE = {"GPipe", "1F1B"}
NUM_WARMUPS = 3
Step = Callable[[], None]


class Tiny(nn.Module):
    """One product of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output * target).sum()


def stepping(library: str, plan: Schedule) -> Step:
    """A step of the schedule on this rank."""
    rank, num_stages, device = disttrain.get_rank(), plan.num_stages, torch.device("cpu")
    indices = plan.placement.stages[rank]
    if library == OURS:
        stage_class, schedule_class = pipelining.PipelineStage, pipelining.get_schedule_class(plan.name)
    else:
        stage_class, schedule_class = torch_pipelining.PipelineStage, torch_schedules.get_schedule_class(plan.name)
    stages = [stage_class(Tiny(), index, num_stages, device) for index in indices]
    schedule = schedule_class(
        stages[0] if plan.name in ONE_STAGE else stages, plan.num_microbatches, loss_fn=loss_of, scale_grads=False
    )
    batch = torch.ones(plan.num_microbatches, 1)
    args = (batch,) if 0 in indices else ()
    target = batch if num_stages - 1 in indices else None
    return lambda: schedule.step(*args, target=target, return_outputs=False)


class Plain:
    """This rank's forwards and backwards in the same order, each with an input of its own, one call after the other."""

    def __init__(self, plan: Schedule) -> None:
        rank = disttrain.get_rank()
        self.stages = {index: Tiny() for index in plan.placement.stages[rank]}
        self.parts = [part for action in plan.ranks[rank] for part in action.parts]
        self.last = plan.num_stages - 1
        self.one = torch.ones(1, 1)
        self.held: dict[tuple[int, int | None], Any] = {}

    def __call__(self) -> None:
        for action in self.parts:
            if action.op is Op.FORWARD:
                self.forward(action)
            elif action.op is Op.BACKWARD_WEIGHT:
                self.backward_weight(action)
            else:
                self.backward(action, [None if action.stage == self.last else self.one])

    def forward(self, action: Action) -> None:
        x = self.one.detach().requires_grad_(action.stage > 0)
        out = self.stages[action.stage](x)
        self.held[action.stage, action.microbatch] = x, loss_of(out, self.one) if action.stage == self.last else out


class PlainOurs(Plain):
    """By our split backward."""

    def forward(self, action: Action) -> None:
        backward = Backward()
        with backward.forward():
            super().forward(action)
        key = action.stage, action.microbatch
        self.held[key] = (backward, *self.held[key])

    def backward(self, action: Action, grads: list[torch.Tensor | None]) -> None:
        key = action.stage, action.microbatch
        backward, x, out = self.held.pop(key)
        if action.op is Op.BACKWARD_INPUT:
            backward.backward_input([out], grads, [x])
            self.held[key] = backward
        else:
            backward.backward([out], grads, [x])

    def backward_weight(self, action: Action) -> None:
        self.held.pop((action.stage, action.microbatch)).backward_weight()


class PlainTorch(Plain):
    """By torch's, which computes everything at once on the first stage: no input's gradient is waited for."""

    def backward(self, action: Action, grads: list[torch.Tensor | None]) -> None:
        key = action.stage, action.microbatch
        x, out = self.held.pop(key)
        if action.op is Op.BACKWARD_INPUT and action.stage:
            _, self.held[key] = stage_backward_input([out], grads, [x], self.stages[action.stage].parameters())
        else:
            torch.autograd.backward([out], grads)

    def backward_weight(self, action: Action) -> None:
        if action.stage:
            stage_backward_weight(
                self.stages[action.stage].parameters(), self.held.pop((action.stage, action.microbatch))
            )


def timed(run: Step) -> tuple[float, float]:
    """Seconds of this thread's computing, and of the clock."""
    disttrain.barrier()
    cpu, wall = time.thread_time(), time.perf_counter()
    run()
    return time.thread_time() - cpu, time.perf_counter() - wall


def costlier(values: list[float]) -> list[float]:
    """The larger of both ranks' values, one by one."""
    found = torch.tensor(values, dtype=torch.float64)
    disttrain.all_reduce(found, disttrain.ReduceOp.MAX)
    return found.tolist()


def measure(name: str, plan: Schedule, libraries: list[str], num_rounds: int) -> list[Row]:
    """Collective."""
    num_actions = len(lower(plan).ranks[disttrain.get_rank()])
    loops = {OURS: PlainOurs, TORCH: PlainTorch}
    runs = {library: (stepping(library, plan), loops[library](plan)) for library in libraries}
    costs: dict[str, list[tuple[float, ...]]] = {library: [] for library in libraries}
    for round_number in range(NUM_WARMUPS + num_rounds):
        for library, (step, loop) in runs.items():
            pairs = zip(timed(step), timed(loop), strict=True)
            if round_number >= NUM_WARMUPS:
                costs[library].append(tuple(1e6 * (whole - bare) / num_actions for whole, bare in pairs))
    found: dict[str, dict[str, Spread]] = {"us of CPU": {}, "us": {}}
    for library, of_rounds in costs.items():
        quartiles = [statistics.quantiles(column, n=4) for column in zip(*of_rounds, strict=True)]
        of_both = costlier([value for column in quartiles for value in column])
        for unit, (least, median, most) in zip(found, (of_both[:3], of_both[3:]), strict=True):
            found[unit][library] = Spread(median, least, most)
    return [Row(f"{name}, an action", unit, sides) for unit, sides in found.items()]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--schedules", nargs="+", default=["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
    parser.add_argument("--libraries", nargs="+", choices=[OURS, TORCH], default=[OURS, TORCH])
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    disttrain.init_process_group("gloo")
    torch.distributed.init_process_group("gloo")
    rows: list[Row] = []
    for name in options.schedules:
        plan = make_schedule(name, disttrain.get_world_size(), options.microbatches)
        rows += measure(name, plan, options.libraries, options.rounds)
    if disttrain.get_rank() == 0:
        finish(rows, options.json)
    torch.distributed.destroy_process_group()
    disttrain.destroy_process_group()


if __name__ == "__main__":
    main()
