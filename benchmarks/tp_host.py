"""What tensor parallel costs the host: ours and torch's under a transport without peers, in turn, in one process.

    python benchmarks/tp_host.py [--rounds 30] [--calls 40] [--json FILE]

A gated MLP on parts of the sequence, forward and backward: one gather and one reduce-scatter each way. Figures are
microseconds of CPU time (of the whole process, whose autograd thread takes part) per forward and backward, medians over
the rounds with quartiles. "plain" is a module of this rank's sizes, "collectives" the four alone; the tensors are too
small to compute for long.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from torch import nn
from torch.distributed import tensor as torch_tensor
from torch.distributed.device_mesh import init_device_mesh as torch_mesh
from torch.distributed.tensor import parallel as torch_tp
from torch.testing._internal.distributed.fake_pg import FakeStore

import disttrain
from disttrain import tp
from disttrain.dtensor import Replicate, Shard
from disttrain.process_group import World, all_gather_into_tensor, entered_world, reduce_scatter_tensor
from disttrain.store import HashStore

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
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--json", type=Path, help="write the results to this file too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    world = World(HashStore(), 0, WORLD_SIZE, backend="fake", timeout_s=1.0, device=torch.device("cpu"))
    part = torch.randn(1, LENGTH // WORLD_SIZE, DIM).requires_grad_()
    whole = torch.randn(1, LENGTH, DIM).requires_grad_()
    with entered_world(world):
        mesh = disttrain.init_device_mesh("cpu", (WORLD_SIZE,))
        other_mesh = torch_mesh("cpu", (WORLD_SIZE,))
        ours = tp.parallelize_module(MLP(HIDDEN), mesh, plan(tp, Shard(1), Replicate()))
        torchs = torch_tp.parallelize_module(
            MLP(HIDDEN), other_mesh, plan(torch_tp, torch_tensor.Shard(1), torch_tensor.Replicate())
        )
        group = mesh.get_group()
        cases: dict[str, Callable[[], None]] = {
            "plain": stepping(MLP(HIDDEN // WORLD_SIZE), whole),
            "collectives": lambda: collectives(group),
            "ours": stepping(ours, part),
            "torch": stepping(torchs, part),
        }
        taken: dict[str, list[float]] = {name: [] for name in cases}
        for round_number in range(options.rounds + 3):
            for name, run in cases.items():
                elapsed = cpu_us(run, options.calls)
                if round_number >= 3:
                    taken[name].append(elapsed)
    results: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "versions": f"disttrain {disttrain.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
    }
    for name, values in taken.items():
        lower, median, upper = statistics.quantiles(values, n=4)
        results[name] = {"median_us": median, "lower_us": lower, "upper_us": upper}
        print(f"{name:12}{median:9.1f} us [{lower:.1f}, {upper:.1f}]")
    floor = results["plain"]["median_us"] + results["collectives"]["median_us"]
    results["ours_over_floor"] = results["ours"]["median_us"] / floor
    results["torch_over_floor"] = results["torch"]["median_us"] / floor
    print(f"over plain and collectives: ours {results['ours_over_floor']:.2f}, torch {results['torch_over_floor']:.2f}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
