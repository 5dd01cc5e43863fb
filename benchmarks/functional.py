"""What a functional collective costs the host: ours under `fake` against torch's on its FakeProcessGroup.

    python benchmarks/functional.py [--rounds 40] [--json FILE]

Nothing is communicated, so this is all that Python and dispatch take. Both sides run in turns in one process, on one
thread; the figures are medians over the rounds, with quartiles, in microseconds of this thread's CPU time, which other
processes on the machine disturb less than the clock on the wall.
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
from types import ModuleType
from typing import Any

import torch
import torch.distributed
import torch.distributed._functional_collectives as torch_functional
from torch.testing._internal.distributed.fake_pg import FakeStore

import disttrain
from disttrain.process_group import World, entered_world, functional
from disttrain.store import HashStore

GROUP_SIZE = 8
NUM_CALLS = 300
Case = Callable[[ModuleType, Any, torch.Tensor], object]


def all_to_all(side: ModuleType, group: Any, tensor: torch.Tensor) -> object:
    return side.wait_tensor(side.all_to_all_single(tensor, None, None, group))


CASES: dict[str, Case] = {
    "all_reduce, wait": lambda side, group, tensor: side.wait_tensor(side.all_reduce(tensor, "sum", group)),
    "all_reduce, add": lambda side, group, tensor: side.all_reduce(tensor, "sum", group) + 1,
    "all_gather_tensor, wait": lambda side, group, tensor: side.wait_tensor(side.all_gather_tensor(tensor, 0, group)),
    "reduce_scatter_tensor, wait": lambda side, group, tensor: side.wait_tensor(
        side.reduce_scatter_tensor(tensor, "sum", 0, group)
    ),
    "broadcast, wait": lambda side, group, tensor: side.wait_tensor(side.broadcast(tensor, 0, group)),
    "all_to_all_single, wait": all_to_all,
}


def round_us(case: Case, side: ModuleType, group: Any, tensor: torch.Tensor) -> float:
    """Microseconds of CPU time per call."""
    start_s = time.thread_time()
    for _ in range(NUM_CALLS):
        case(side, group, tensor)
    return (time.thread_time() - start_s) / NUM_CALLS * 1e6


def measure(group: Any, num_rounds: int) -> dict[str, dict[str, list[float]]]:
    """Microseconds per case, side and round."""
    tensor = torch.ones(GROUP_SIZE * 2)
    sides = {"disttrain": (functional, None), "torch": (torch_functional, group)}
    taken: dict[str, dict[str, list[float]]] = {case: {name: [] for name in sides} for case in CASES}
    for _ in range(num_rounds):
        for name, case in CASES.items():
            for side_name, (side, its_group) in sides.items():
                taken[name][side_name].append(round_us(case, side, its_group, tensor))
    return taken


def shown(times_us: list[float]) -> str:
    lower, median, upper = statistics.quantiles(times_us, n=4)
    return f"{median:6.1f} [{lower:.1f}, {upper:.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path, help="write the results to this file too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=GROUP_SIZE)
    world = World(HashStore(), 0, GROUP_SIZE, backend="fake", timeout_s=1.0, device=torch.device("cpu"))
    with entered_world(world):
        taken = measure(torch.distributed.group.WORLD, options.rounds)
    print(f"{'us of CPU time':<28} {'disttrain':<22} {'torch':<24} ratio")
    for case, sides in taken.items():
        ratio = statistics.median(sides["disttrain"]) / statistics.median(sides["torch"])
        print(f"{case:<28} {shown(sides['disttrain']):<22} {shown(sides['torch']):<24} {ratio:.2f}")
    torch.distributed.destroy_process_group()
    if options.json is not None:
        revision = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        result = {
            "command": " ".join(["python", *sys.argv]),
            "commit": revision.stdout.strip(),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "disttrain": disttrain.__version__,
            },
            "rounds_us": taken,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
