"""What tensor parallel costs the host: ours and torch's under a transport without peers, in turn, in one process.

    python benchmarks/tp_host.py [--rounds 30] [--calls 40] [--json FILE]

A gated MLP on parts of the sequence, forward and backward: one gather and one reduce-scatter each way. Figures are of
CPU time (of the whole process, whose autograd thread takes part) per forward and backward. "plain" is a module of this
rank's sizes, "collectives" the four alone; the tensors are too small to compute for long.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from harness import OURS, TORCH, command_line, finish, in_turns, row
from torch import nn
from torch.distributed import tensor as torch_tensor
from torch.distributed.device_mesh import init_device_mesh as torch_mesh
from torch.distributed.tensor import parallel as torch_tp
from without_peers import UNRECORDED, unrecorded, without_peers

import disttrain
from disttrain import tp
from disttrain.dtensor import Replicate, Shard
from disttrain.process_group import all_gather_into_tensor, reduce_scatter_tensor

WORLD_SIZE = 4
DIM, HIDDEN, LENGTH = 16, 32, 8


class MLP(nn.Module):
    """Gated, of `hidden` columns."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, hidden, bias=False)
        self.up = nn.Linear(DIM, hidden, bias=False)
        self.down = nn.Linear(hidden, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def plan(styles: Any, shard: Any, whole: Any) -> dict[str, Any]:
    """The same for both: torch's names are ours."""
    return {
        "": styles.PrepareModuleInput(input_layouts=shard, desired_input_layouts=whole),
        "gate": styles.ColwiseParallel(),
        "up": styles.ColwiseParallel(),
        "down": styles.RowwiseParallel(output_layouts=shard),
    }


def collectives(group: Any, backward: bool = True) -> None:
    part, whole = torch.empty(1, LENGTH // WORLD_SIZE, DIM), torch.empty(1, LENGTH, DIM)
    for _ in range(1 + backward):
        all_gather_into_tensor(whole.view(-1), part.view(-1), group, async_op=True).wait()
        reduce_scatter_tensor(part.view(-1), whole.view(-1), group=group, async_op=True).wait()


def cpu_us(run: Callable[[], None], num_calls: int) -> float:
    start_s = time.process_time()
    for _ in range(num_calls):
        run()
    return (time.process_time() - start_s) / num_calls * 1e6


def stepping(module: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    out = torch.ones_like(x)
    parameters = list(module.parameters())

    def run() -> None:
        module(x).backward(out)
        x.grad = None
        for parameter in parameters:
            parameter.grad = None

    return run


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=40)
    options = parser.parse_args()
    part = torch.randn(1, LENGTH // WORLD_SIZE, DIM).requires_grad_()
    whole = torch.randn(1, LENGTH, DIM).requires_grad_()
    with without_peers(WORLD_SIZE):
        mesh = disttrain.init_device_mesh("cpu", (WORLD_SIZE,))
        other_mesh = torch_mesh("cpu", (WORLD_SIZE,))
        ours = tp.parallelize_module(MLP(HIDDEN), mesh, plan(tp, Shard(1), Replicate()))
        torchs = torch_tp.parallelize_module(
            MLP(HIDDEN), other_mesh, plan(torch_tp, torch_tensor.Shard(1), torch_tensor.Replicate())
        )
        cases: dict[str, Callable[[], None]] = {
            OURS: stepping(ours, part),
            TORCH: stepping(torchs, part),
            "plain": stepping(MLP(HIDDEN // WORLD_SIZE), whole),
            "collectives": partial(collectives, mesh.get_group()),
        }
        calls = {side: partial(cpu_us, run, options.calls) for side, run in cases.items()}
        calls[UNRECORDED] = unrecorded(calls[OURS])
        taken = in_turns(calls, options.rounds, 3)
    floor = sum(statistics.median(taken[name]) for name in ("plain", "collectives"))
    over = {side: [value / floor for value in taken[side]] for side in (OURS, TORCH, UNRECORDED)}
    finish([row("gated MLP", "us of CPU", taken), row("over plain and collectives", "ratio", over)], options.json)


if __name__ == "__main__":
    main()
