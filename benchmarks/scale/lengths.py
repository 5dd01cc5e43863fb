"""Calls with a length that no call had before, of small models on meshes of one to four axes, beside later such calls.

    python benchmarks/scale/lengths.py [--quick] [--json FILE]

Figures are of this thread's CPU time. Batches are cut along all axes, parameters are replicated. torch's own kernels
have had each length before, outside of DTensor: oneDNN builds some of them for each size. torch's DTensor plans a new
length anew, in seconds on many axes, and so stands beside one model only.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import OURS, TORCH, Row, command_line, finish, row
from torch.distributed import tensor as torch_dtensor
from torch.distributed.device_mesh import init_device_mesh as torch_mesh
from without_peers import without_peers

import disttrain
from disttrain import dtensor

MESHES = ((4,), (2, 2), (2, 2, 2), (2, 2, 2, 2))
QUICK_MESHES = ((2, 2),)
PACKAGES: dict[str, Any] = {OURS: dtensor, TORCH: torch_dtensor}
MAKERS: dict[str, Callable[..., Any]] = {OURS: disttrain.init_device_mesh, TORCH: torch_mesh}
DIM = 16
NUM_BEFORE = 4
"""Lengths whose calls are not counted: the first plan for any size is made with them."""


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.gate, self.up = nn.Linear(DIM, 32, bias=False), nn.Linear(DIM, 32, bias=False)
        self.down = nn.Linear(32, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Attention(nn.Module):
    """Two heads, with halves turned and joined as rotary positions do where `turns`."""

    def __init__(self, *, turns: bool) -> None:
        super().__init__()
        self.turns, self.qkv, self.out = turns, nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, 2, 8).transpose(1, 2) for part in self.qkv(x).split(DIM, -1))
        if self.turns:
            q, k = turned(q), turned(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, DIM))


def turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * 0.5 + torch.cat((-second, first), -1) * 0.5


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(self.convolution(x.unsqueeze(1).expand(-1, 4, -1, -1))))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "MLP with norm": lambda: nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, DIM)),
    "SwiGLU": SwiGLU,
    "attention": lambda: Attention(turns=False),
    "attention, turned": lambda: Attention(turns=True),
    "convolution, group norm": Convolution,
}


def rows(quick: bool) -> list[Row]:
    """The rows of the table; quick: of one mesh."""
    taken = []
    for sizes in QUICK_MESHES if quick else MESHES:
        with without_peers(torch.Size(sizes).numel()):
            for name, model in MODELS.items():
                sides = (OURS, TORCH) if name == "MLP with norm" else (OURS,)
                taken += of_model(name, model, sizes, sides, 5 if quick else 12)
    return taken


def of_model(
    name: str, model: Callable[[], nn.Module], sizes: tuple[int, ...], sides: tuple[str, ...], num_lengths: int
) -> list[Row]:
    title = f"{name}, {len(sizes)} axes"
    new_us: dict[str, list[float]] = {}
    known_us: dict[str, list[float]] = {}
    for side in sides:
        new_us[side], known_us[side] = of_lengths(side, model, sizes, forward_and_backward, 2, num_lengths)
    # Of lengths that the calls above have not had.
    first = 2 + NUM_BEFORE + num_lengths
    new_alone_us, known_alone_us = of_lengths(OURS, model, sizes, forward_alone, first, num_lengths)
    return [
        row(f"{title}, a new length", "us of CPU", new_us),
        row(f"{title}, that length again", "us of CPU", known_us),
        row(f"{title}, a new length", "of a known one's", {OURS: [ratio(new_us[OURS], known_us[OURS])]}),
        row(f"{title}, forward alone, a new length", "of a known one's", {OURS: [ratio(new_alone_us, known_alone_us)]}),
    ]


def ratio(new_us: list[float], known_us: list[float]) -> float:
    return statistics.median(new_us) / statistics.median(known_us)


def of_lengths(
    side: str,
    make: Callable[[], nn.Module],
    sizes: tuple[int, ...],
    call: Callable[[nn.Module, torch.Tensor], object],
    first: int,
    num_lengths: int,
) -> tuple[list[float], list[float]]:
    """Microseconds of the first call with each length, and of the third."""
    package, mesh = PACKAGES[side], MAKERS[side]("cpu", sizes)
    alone, model = make(), replicated(make(), package, mesh)
    extra = {"run_check": False} if side == TORCH else {}
    new_us, known_us = [], []
    for length in range(first, first + NUM_BEFORE + num_lengths):
        part = torch.randn(length, DIM, DIM)
        call(alone, part)
        x = package.DTensor.from_local(part, mesh, [package.Shard(0)] * len(sizes), **extra)
        times_us = [cpu_us(call, model, x) for _ in range(3)]
        if length >= first + NUM_BEFORE:
            new_us.append(times_us[0])
            known_us.append(times_us[2])
    return new_us, known_us


def replicated(model: nn.Module, package: Any, mesh: Any) -> nn.Module:
    for module in model.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            whole = package.distribute_tensor(parameter.detach(), mesh, [package.Replicate()] * mesh.ndim)
            setattr(module, name, nn.Parameter(whole))
    return model


def forward_and_backward(model: nn.Module, x: torch.Tensor) -> None:
    y = model(x)
    (y * y).mean().backward()


def forward_alone(model: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        model(x)


def cpu_us(call: Callable[[nn.Module, torch.Tensor], object], model: nn.Module, x: torch.Tensor) -> float:
    gc.disable()  # a look for cycles would be one call's alone
    start_s = time.thread_time()
    call(model, x)
    used_s = time.thread_time() - start_s
    gc.enable()
    return used_s * 1e6


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    finish(rows(options.quick), options.json)


if __name__ == "__main__":
    main()
