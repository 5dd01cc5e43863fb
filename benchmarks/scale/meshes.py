"""Meshes, groups and tensors on them in worlds of a thousand ranks to a hundred thousand, played on one.

    python benchmarks/scale/meshes.py [--quick] [--json FILE]

Figures are of this thread's CPU time, of a call like ones before where nothing else is said. Memory is of Python's
objects. The first operator of a process is one in a process of its own, after both libraries are loaded.
"""

from __future__ import annotations

import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import OURS, TORCH, Row, command_line, finish, in_turns, row
from torch.distributed import tensor as torch_dtensor
from torch.distributed.device_mesh import init_device_mesh as torch_mesh
from without_peers import without_peers

import disttrain
from disttrain import dtensor

SIZES = (1 << 10, 1 << 14, 102_400)
AXES = ("pp", "dp", "tp")
NUM_PARAMETERS = 64
CALLS = 5
QUICK_SIZES = (1 << 10, 1 << 14)
PACKAGES: dict[str, Any] = {OURS: dtensor, TORCH: torch_dtensor}
FIRST_OPERATOR = """
import sys, time, torch
import {module} as package
{start}
tensor = package.distribute_tensor(torch.ones(4, 4), mesh, [package.Shard(0)])
num_modules, start_s = len(sys.modules), time.process_time()
tensor + tensor
print((time.process_time() - start_s) * 1e3, len(sys.modules) - num_modules)
"""
STARTS = {
    OURS: "import disttrain; disttrain.init_process_group('fake', world_size=4, rank=0)\n"
    "mesh = disttrain.init_device_mesh('cpu', (4,))",
    TORCH: "from torch.testing._internal.distributed.fake_pg import FakeStore\n"
    "torch.distributed.init_process_group('fake', store=FakeStore(), rank=0, world_size=4)\n"
    "mesh = torch.distributed.init_device_mesh('cpu', (4,))",
}


def rows(quick: bool) -> list[Row]:
    """The rows of the table; quick: of smaller worlds, and fewer rounds."""
    num_rounds = 3 if quick else 5
    taken = [*first_operators(1 if quick else 3)]
    for world_size in QUICK_SIZES if quick else SIZES:
        with without_peers(world_size):
            taken += of_world(world_size, num_rounds)
    return taken


def of_world(world_size: int, num_rounds: int) -> Iterator[Row]:
    shape = (2, world_size // 16, 8)
    makes: dict[str, Callable[[], Any]] = {
        OURS: lambda: disttrain.init_device_mesh("cpu", shape, mesh_dim_names=AXES),
        TORCH: lambda: torch_mesh("cpu", shape, mesh_dim_names=AXES),
    }
    groups: dict[str, Callable[[], Any]] = {OURS: disttrain.new_group, TORCH: torch.distributed.new_group}
    meshes = {side: make() for side, make in makes.items()}
    cases: dict[str, dict[str, Callable[[], Any]]] = {
        "Partial to Replicate over two axes": {side: to_replicate(side, mesh) for side, mesh in meshes.items()},
        f"clip_grad_norm_ of {NUM_PARAMETERS} parameters": {side: clip(side, mesh) for side, mesh in meshes.items()},
        "slice of all but the last axis": {side: lambda mesh=mesh: mesh[AXES[:-1]] for side, mesh in meshes.items()},
    }
    for name, calls in cases.items():
        timed = {side: lambda call=call: cpu_us(call, CALLS) for side, call in calls.items()}
        yield row(f"{name}, {world_size:,} ranks", "us of CPU", in_turns(timed, num_rounds, 2))
    for name, once in {"mesh of all ranks": makes, "new_group of all": groups}.items():
        timed = {side: lambda call=call: cpu_us(call, 1) / 1e3 for side, call in once.items()}
        yield row(f"{name}, {world_size:,} ranks", "ms of CPU", in_turns(timed, min(num_rounds, 3)))
    memory = {side: [kept_mib(call)] for side, call in groups.items()}
    yield row(f"new_group of all, {world_size:,} ranks", "MiB", memory)


def to_replicate(side: str, mesh: Any) -> Callable[[], Any]:
    package = PACKAGES[side]
    partial = [package.Replicate(), package.Partial(), package.Partial()]
    extra = {"run_check": False} if side == TORCH else {}
    total = package.DTensor.from_local(torch.ones(()), mesh, partial, **extra)
    return lambda: total.redistribute(mesh, [package.Replicate()] * 3)


def clip(side: str, mesh: Any) -> Callable[[], Any]:
    package = PACKAGES[side]
    extra = {"run_check": False} if side == TORCH else {}
    cut = [package.Replicate(), package.Shard(0), package.Shard(0)]
    parameters = []
    for _ in range(NUM_PARAMETERS):
        parameter = torch.nn.Parameter(package.DTensor.from_local(torch.ones(2, 2), mesh, cut, **extra))
        parameter.grad = package.DTensor.from_local(torch.ones(2, 2), mesh, cut, **extra)
        parameters.append(parameter)

    def call() -> None:
        norm: Any = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        norm.full_tensor()

    return call


def first_operators(num_rounds: int) -> Iterator[Row]:
    """The first operator on DTensors of a process, and the modules that it imports."""
    answers: dict[str, list[list[float]]] = {OURS: [], TORCH: []}
    for _ in range(num_rounds):
        for side, of_side in answers.items():
            module = "disttrain.dtensor" if side == OURS else "torch.distributed.tensor"
            program = FIRST_OPERATOR.format(module=module, start=STARTS[side])
            ran = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True
            )
            of_side.append([float(word) for word in ran.stdout.split()])
    yield row(
        "first operator of a process", "ms of CPU", {side: [each[0] for each in of] for side, of in answers.items()}
    )
    yield row(
        "first operator of a process", "modules", {side: [each[1] for each in of] for side, of in answers.items()}
    )


def cpu_us(call: Callable[[], object], num_calls: int) -> float:
    start_s = time.thread_time()
    for _ in range(num_calls):
        call()
    return (time.thread_time() - start_s) / num_calls * 1e6


def kept_mib(make: Callable[[], object]) -> float:
    """The memory of what is made, once others like it have been."""
    make()
    tracemalloc.start()
    made = make()
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del made
    return kept / (1 << 20)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    finish(rows(options.quick), options.json)


if __name__ == "__main__":
    main()
