"""What a stage's F, I, W and B take with nobody to wait for, and a message between two ranks: the simulator's `Costs`.

All ranks measure at once, each its own stages, as they compute in a step: GPUs under load are slower than one alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from pipelines.model import Sizes, Stage, loss_of

import disttrain
from disttrain.pipelining import Backward, Costs, Link

NUM_WARMUPS = 2


class Laps:
    """Seconds between marks: a GPU's own where there is one, so that the host may run ahead."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self.marks: list[float | torch.cuda.Event] = []

    def mark(self) -> None:
        if self.is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        if self.is_cuda:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) / 1e3 for a, b in zip(self.marks, self.marks[1:], strict=False)]
        return [b - a for a, b in zip(self.marks, self.marks[1:], strict=False)]


def measure_stage(
    stage: Stage, given: torch.Tensor, tokens: torch.Tensor | None, *, is_split: bool, num_runs: int
) -> dict[str, float]:
    """Median seconds of F and B, and where the backward is split of I and W. With `tokens` the loss belongs to it."""
    out_grad: torch.Tensor | None = None

    def forward() -> tuple[Backward, torch.Tensor, torch.Tensor]:
        backward = Backward()
        x = given.detach().requires_grad_(given.is_floating_point())
        with backward.forward():
            out = stage(x)
            return backward, x, out if tokens is None else loss_of(out, tokens)

    def run(laps: Laps, *, in_two: bool) -> None:
        nonlocal out_grad
        laps.mark()
        backward, x, out = forward()
        if tokens is None and out_grad is None:
            out_grad = torch.randn_like(out)
        grads = None if out_grad is None else [out_grad]
        laps.mark()
        if in_two:
            backward.backward_input([out], grads, [x])
            laps.mark()
            backward.backward_weight()
        else:
            backward.backward([out], grads, [x])
        laps.mark()

    found: dict[str, float] = {}
    for names, in_two in (("FB", False), ("FIW", True)) if is_split else (("FB", False),):
        runs = []
        # Not waited for in between: the host must not show where the GPU is what is slow.
        for _ in range(NUM_WARMUPS + num_runs):
            laps = Laps(given.device)
            run(laps, in_two=in_two)
            runs.append(laps)
        rows = zip(*(laps.seconds() for laps in runs[NUM_WARMUPS:]), strict=True)
        found |= {name: statistics.median(row) for name, row in zip(names, rows, strict=True)}
    return found


def measure_link(num_bytes: int, device: torch.device, num_runs: int = 20) -> Link:
    """Between ranks 0 and 1, there and back; the other ranks' links are taken for the same."""
    rank = disttrain.get_rank()

    def one_way_s(message: torch.Tensor) -> float:
        elapsed_s = 0.0
        for turns in (3, num_runs):
            disttrain.barrier()
            begin = time.perf_counter()
            for _ in range(turns if rank < 2 else 0):
                steps: list[Callable[..., object]] = [disttrain.send, disttrain.recv]
                for step in steps if rank == 0 else steps[::-1]:
                    step(message, 1 - rank)
            if device.type == "cuda":
                torch.cuda.synchronize()
            elapsed_s = (time.perf_counter() - begin) / turns / 2
        return elapsed_s

    times = torch.tensor(
        [one_way_s(torch.zeros(size, dtype=torch.uint8, device=device)) for size in (1, num_bytes)],
        dtype=torch.float64,
    )
    disttrain.broadcast(times, 0)
    latency_s, whole_s = times.tolist()
    return Link(latency_s, num_bytes / max(whole_s - latency_s, 1e-9))


def measure_costs(
    stages: dict[int, Stage], num_stages: int, sizes: Sizes, tokens: torch.Tensor, *, is_split: bool, num_runs: int
) -> Costs:
    """Collective. `tokens` are one microbatch; `stages` this rank's, which are left with gradients."""
    weight = next(parameter for stage in stages.values() for parameter in stage.parameters())
    activations = torch.randn(*tokens.shape, sizes.dim, device=weight.device, dtype=weight.dtype)
    link = measure_link(activations.nbytes, weight.device)
    table = torch.zeros(4, num_stages, dtype=torch.float64)
    disttrain.barrier()
    for index, stage in stages.items():
        found = measure_stage(
            stage,
            tokens if index == 0 else activations,
            tokens if index == num_stages - 1 else None,
            is_split=is_split,
            num_runs=num_runs,
        )
        table[:, index] = torch.tensor([found.get(kind, 0.0) for kind in "FIWB"])
    disttrain.all_reduce(table)
    forward, backward_input, backward_weight, backward = map(tuple, table.tolist())
    return Costs(
        forward, backward_input, backward_weight, backward_s=backward, message_bytes=activations.nbytes, link=link
    )
