"""What a DTensor operator costs the host: ours and torch's under a transport without peers, in turn, in one process.

    python benchmarks/dtensor.py [--rounds 40] [--json FILE]

A hit is a call like one before; a new length is the same call with a first dim that was never seen; a miss is a call
never seen in any form. Figures are of this thread's CPU time, which other processes on the machine disturb less than
the clock on the wall. "local" is the same on this rank's part
as a plain tensor: what remains when dispatch costs nothing. Ours is as jobs run it, with the flight recorder, and
"unrecorded" without, where there are collectives.

The leaves of "forward and backward" are plain tensors that require gradients. Of a replicated nn.Parameter we would
also reduce the gradient there, which torch leaves to whoever reads it.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from harness import OURS, TORCH, command_line, finish, in_turns, row
from torch.distributed import tensor as torch_dtensor
from torch.distributed.device_mesh import init_device_mesh as torch_mesh
from without_peers import UNRECORDED, below, unrecorded, without_peers

import disttrain
from disttrain import dtensor

WORLD_SIZE = 16
CALLS_PER_ROUND = 200
NUM_PARAMETERS = 176
NUM_FRAMES = 20
"""Below which a trainer calls."""
COMMUNICATING = ("to Replicate", "parameters")
"""How the names of cases with collectives end: these are measured without the recorder too."""
MESHES = {"1-D": (16,), "2-D": (4, 4)}
Case = Callable[[], object]


class Side:
    """One library's names, on meshes of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        package: Any = dtensor if name == OURS else torch_dtensor
        make = disttrain.init_device_mesh if name == OURS else torch_mesh
        sizes: list[tuple[int, ...]] = [] if name == "local" else [(16,), (4, 4), (2, 4, 2), (2, 2, 2, 2)]
        self.meshes: dict[tuple[int, ...], Any] = {size: make("cpu", size) for size in sizes}
        self.package = package

    def tensor(self, part: torch.Tensor, mesh_size: tuple[int, ...], *placements: tuple[Any, ...]) -> torch.Tensor:
        """A DTensor whose part on this rank is `part`; ("Shard", 0), ("Replicate",), ("Partial",) say how it lies."""
        if self.name == "local":
            return part
        made = [getattr(self.package, kind)(*arguments) for kind, *arguments in placements]
        extra: dict[str, Any] = {"run_check": False} if self.name == TORCH else {}
        tensor: torch.Tensor = self.package.DTensor.from_local(part, self.meshes[mesh_size], made, **extra)
        return tensor


SIDES = ("local", OURS, TORCH)


def hits(side: Side, mesh_size: tuple[int, ...]) -> Iterator[tuple[str, Case]]:
    """Calls on tensors whose rows are cut along the first axis; along a second one, weights' columns are."""
    is_2d = len(mesh_size) == 2
    rows = [("Shard", 0), ("Replicate",)][: len(mesh_size)]
    columns = [("Replicate",), ("Shard", 0)] if is_2d else [("Replicate",)]
    whole = [("Replicate",)] * len(mesh_size)

    def tensor(part: torch.Tensor, placements: Sequence[tuple[Any, ...]]) -> torch.Tensor:
        return side.tensor(part, mesh_size, *placements)

    x, y = tensor(torch.randn(8, 16), rows), tensor(torch.randn(8, 16), rows)
    cube = tensor(torch.randn(4, 8, 16), rows)
    weight, bias = tensor(torch.randn(16, 16), columns), tensor(torch.randn(16), columns)
    square, scale = tensor(torch.randn(16, 16), whole), tensor(torch.randn(16), whole)
    yield "add", lambda: x + y
    yield "mul by a number", lambda: x * 2.0
    yield "detach", x.detach
    yield "view", lambda: cube.view(-1, 16)
    yield "mm", lambda: x @ square
    yield "linear with bias", lambda: torch.nn.functional.linear(x, weight, bias)
    yield "layer_norm", lambda: torch.nn.functional.layer_norm(x, (16,), scale, scale)
    yield "softmax", lambda: x.softmax(-1)
    yield "sum", lambda: x.sum(1)

    grad_x, grad_weight = x.detach().requires_grad_(), weight.detach().requires_grad_()

    @torch.enable_grad()
    def forward_backward() -> None:
        torch.nn.functional.linear(grad_x, grad_weight).backward(ones)
        grad_x.grad = grad_weight.grad = None

    ones = torch.ones_like(torch.nn.functional.linear(x, weight))
    yield "linear, forward and backward", forward_backward


def redistributions(side: Side) -> Iterator[tuple[str, Case]]:
    if side.name == "local":
        return
    replicate = [side.package.Replicate()]
    for kind in (("Shard", 0), ("Partial",)):
        tensor = side.tensor(torch.randn(64, 16), (16,), kind)
        yield f"{kind[0]} to Replicate", functools.partial(tensor.redistribute, placements=replicate)  # type: ignore[attr-defined]


def optimizers(side: Side) -> Iterator[tuple[str, Case]]:
    parameters: list[torch.nn.Parameter] = []
    for kind in ("foreach", "fused"):
        parameters = []
        for _ in range(NUM_PARAMETERS):
            parameter = torch.nn.Parameter(side.tensor(torch.randn(16, 8), (16,), ("Shard", 0)))
            parameter.grad = side.tensor(torch.randn(16, 8), (16,), ("Shard", 0))
            parameters.append(parameter)
        yield f"AdamW {kind}, {NUM_PARAMETERS} parameters", torch.optim.AdamW(parameters, **{kind: True}).step  # type: ignore[arg-type]
    for foreach in (None, False, True):
        yield (
            f"clip_grad_norm_, foreach={foreach}, {NUM_PARAMETERS} parameters",
            functools.partial(torch.nn.utils.clip_grad_norm_, parameters, 1.0, foreach=foreach),
        )


def new_lengths(side: Side, num_rounds: int) -> dict[str, list[float]]:
    """Microseconds of the first call with each length, and of the second; both once, so without warm caches."""
    square = side.tensor(torch.randn(16, 16), (16,), ("Replicate",))
    calls: dict[str, Callable[[torch.Tensor], object]] = {
        "add, new length": lambda x: x + x,
        "mm, new length": lambda x: x @ square,
        "softmax, new length": lambda x: x.softmax(-1),
    }
    taken: dict[str, list[float]] = {}
    for name, call in calls.items():
        again = name.replace("new length", "that length again")
        taken[name], taken[again] = [], []
        for length in range(2, num_rounds + 5):
            for kind in (name, again):
                x = side.tensor(torch.randn(length, 16), (16,), ("Shard", 0))
                start_s = time.thread_time()
                call(x)
                taken[kind].append((time.thread_time() - start_s) * 1e6)
        del taken[name][:3], taken[again][:3]
    return taken


def misses(side: Side) -> dict[str, list[float]]:
    """Microseconds of first calls of binary operators, on meshes of one to four axes."""
    taken: dict[str, list[float]] = {}
    names = ("add", "sub", "mul", "div", "maximum", "minimum", "atan2", "hypot", "fmod", "pow")
    for mesh_size in side.meshes:
        name = f"miss on {len(mesh_size)} axes"
        placements = [("Shard", axis % 2) for axis in range(len(mesh_size))]
        x = side.tensor(torch.rand(16, 16), mesh_size, *placements)
        taken[name] = []
        for operator in names:
            start_s = time.thread_time()
            getattr(torch, operator)(x, x)
            taken[name].append((time.thread_time() - start_s) * 1e6)
    return taken


def cpu_us(call: Case, num_calls: int) -> float:
    start_s = time.thread_time()
    for _ in range(num_calls):
        call()
    return (time.thread_time() - start_s) / num_calls * 1e6


def all_in_turns(
    cases: dict[str, dict[str, Case]], num_rounds: int, num_calls: int
) -> dict[str, dict[str, list[float]]]:
    for sides in cases.values():
        for call in sides.values():
            for _ in range(3):
                call()
    taken = {}
    for name, sides in cases.items():
        calls = {side: functools.partial(cpu_us, call, num_calls) for side, call in sides.items()}
        if name.endswith(COMMUNICATING):
            calls[UNRECORDED] = unrecorded(calls[OURS])
        taken[name] = in_turns(calls, num_rounds)
    return taken


def by_case(sides: Sequence[Side], cases: Callable[[Side], Iterator[tuple[str, Case]]]) -> dict[str, dict[str, Case]]:
    found: dict[str, dict[str, Case]] = {}
    for side in sides:
        for name, call in cases(side):
            found.setdefault(name, {})[side.name] = call
    return found


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    taken: dict[str, dict[str, list[float]]] = {}
    with without_peers(WORLD_SIZE), torch.no_grad():
        sides = [Side(name) for name in SIDES]
        missed = {side.name: misses(side) for side in sides if side.name != "local"}
        taken |= {name: {side: missed[side][name] for side in missed} for name in missed[OURS]}
        for mesh_name, mesh_size in MESHES.items():
            cases = by_case(sides, functools.partial(hits, mesh_size=mesh_size))
            of_mesh = all_in_turns(cases, options.rounds, CALLS_PER_ROUND)
            taken |= {f"{name}, {mesh_name}": times for name, times in of_mesh.items()}
        lengths = {side.name: new_lengths(side, options.rounds) for side in sides}
        taken |= {name: {side: lengths[side][name] for side in lengths} for name in lengths[OURS]}
        for cases_of, num_calls in ((redistributions, CALLS_PER_ROUND), (optimizers, 3)):
            cases = by_case(sides, cases_of)
            taken |= below(NUM_FRAMES, functools.partial(all_in_turns, cases, options.rounds, num_calls))
    finish([row(name, "us of CPU", times) for name, times in taken.items()], options.json)


if __name__ == "__main__":
    main()
