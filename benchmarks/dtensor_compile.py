"""A training step of a small tensor-parallel MLP, eager and compiled: what is left of a DTensor's dispatch in a graph.

    python benchmarks/dtensor_compile.py [--rounds 30] [--backend aot_eager] [--json FILE]

Forward and backward of blocks of layer_norm, linear, gelu, linear, with our DTensors and torch's under a transport
without peers, in turn, in one process. "local" is the same on this rank's parts as plain tensors, without collectives.
Figures are of this thread's CPU time; "compiling" is the first step, "compiling for all sizes" the first one on another
batch size.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from harness import OURS, TORCH, command_line, finish, row
from torch.distributed import tensor as torch_dtensor
from torch.distributed.device_mesh import init_device_mesh as torch_mesh
from without_peers import without_peers

import disttrain
from disttrain import dtensor

WORLD_SIZE = 4
WIDTH = 16
NUM_BLOCKS = 4
SIDES = ("local", OURS, TORCH)

Lay = Callable[[torch.Tensor, Any], torch.Tensor]
"""Makes a tensor of a part and of how it lies: 0 or 1 for the dim that is cut, None where it is whole."""


def lay_out(side: str) -> Lay:
    if side == "local":
        return lambda part, _: part
    package: Any = dtensor if side == "ours" else torch_dtensor
    mesh: Any = (disttrain.init_device_mesh if side == "ours" else torch_mesh)("cpu", (WORLD_SIZE,))
    extra: dict[str, Any] = {} if side == "ours" else {"run_check": False}

    def lay(part: torch.Tensor, dim: int | None) -> torch.Tensor:
        placement = package.Replicate() if dim is None else package.Shard(dim)
        tensor: torch.Tensor = package.DTensor.from_local(part, mesh, [placement], **extra)
        return tensor

    return lay


def blocks(x: torch.Tensor, weights: list[tuple[torch.Tensor, ...]], whole: Any) -> torch.Tensor:
    for scale, up, down in weights:
        hidden = F.gelu(F.linear(F.layer_norm(x, (WIDTH,), scale, scale), up))
        moved = F.linear(hidden, down)
        # Laid out by hand, as tensor-parallel modules do, so that both libraries move the same.
        x = x + (moved if whole is None else moved.redistribute(placements=whole))  # type: ignore[attr-defined]
    return x.sum()


class Side:
    """One library's model, and its step."""

    def __init__(self, name: str, backend: str | None) -> None:
        self.lay = lay_out(name)
        part = 4 * WIDTH // WORLD_SIZE
        self.weights = [
            tuple(
                self.lay(torch.randn(shape), dim).detach().requires_grad_()
                for shape, dim in (((WIDTH,), None), ((part, WIDTH), 0), ((WIDTH, part), 1))
            )
            for _ in range(NUM_BLOCKS)
        ]
        self.whole = {"local": None, "ours": [dtensor.Replicate()], "torch": [torch_dtensor.Replicate()]}[name]
        self.run = blocks if backend is None else torch.compile(blocks, backend=backend, fullgraph=True)

    def batch(self, num_rows: int) -> torch.Tensor:
        return self.lay(torch.randn(num_rows, WIDTH), None)

    def step(self, x: torch.Tensor) -> None:
        self.run(x, self.weights, self.whole).backward()


def timed(run: Callable[[], object]) -> float:
    """Microseconds of CPU time."""
    start = time.thread_time()
    run()
    return 1e6 * (time.thread_time() - start)


def measured(side: Side, rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for kind, num_rows in (("compiling", 8), ("compiling for all sizes", 24)):
        x = side.batch(num_rows)
        found[kind] = [timed(lambda x=x: side.step(x))]  # type: ignore[misc]
    x = side.batch(24)
    side.step(x)
    found["step"] = [timed(lambda: side.step(x)) for _ in range(rounds)]
    return found


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--backend", default="aot_eager", help="of torch.compile")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    with without_peers(WORLD_SIZE):
        for backend in (None, options.backend):
            taken = {}
            for side in SIDES:
                torch._dynamo.reset()
                taken[side] = measured(Side(side, backend), options.rounds)
            kinds = ("step",) if backend is None else ("step", "compiling", "compiling for all sizes")
            for kind in kinds:
                times = {side: of_side[kind] for side, of_side in taken.items()}
                rows.append(row(f"{kind}, {backend or 'eager'}", "ms of CPU", times, 1e-3))
    finish(rows, options.json)


if __name__ == "__main__":
    main()
