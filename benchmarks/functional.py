"""What a functional collective costs the host: ours under `fake` against torch's on its FakeProcessGroup.

    python benchmarks/functional.py [--rounds 40] [--json FILE]

Ours is as jobs run it, with the flight recorder, and "unrecorded" without.
Nothing is communicated, so this is all that Python and dispatch take. Figures are of this thread's CPU time, which
other processes on the machine disturb less than the clock on the wall.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed
import torch.distributed._functional_collectives as torch_functional
from harness import OURS, TORCH, command_line, finish, in_turns, row
from without_peers import UNRECORDED, below, unrecorded, without_peers

from disttrain.process_group import functional

GROUP_SIZE = 8
NUM_CALLS = 300
NUM_FRAMES = 20
"""Below which a trainer calls."""
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


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    tensor = torch.ones(GROUP_SIZE * 2)
    with without_peers(GROUP_SIZE):
        sides = {OURS: (functional, None), TORCH: (torch_functional, torch.distributed.group.WORLD)}
        rows = []
        for name, case in CASES.items():
            calls = {side: partial(round_us, case, *of, tensor) for side, of in sides.items()}
            calls[UNRECORDED] = unrecorded(calls[OURS])
            taken = below(NUM_FRAMES, partial(in_turns, calls, options.rounds))
            rows.append(row(name, "us of CPU", taken))
    finish(rows, options.json)


if __name__ == "__main__":
    main()
