"""What sharding costs the host: ours and torch's under a transport without peers, in turn, in one process.

    python benchmarks/fsdp2_host.py [--rounds 20] [--layers 16] [--json FILE]

One iteration is a forward and a backward of layers with eleven parameters each, too small to compute for long. Figures
are milliseconds of CPU time (of the whole process, whose autograd thread takes part) per layer, medians over the rounds
with quartiles; "plain" is the same model without sharding, and taken away from both.
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
from torch import nn
from torch.distributed.device_mesh import init_device_mesh as torch_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import disttrain
from disttrain.fsdp2 import MixedPrecisionPolicy, fully_shard
from disttrain.process_group import World, entered_world
from disttrain.store import HashStore

WORLD_SIZE = 8
DIM = 16


class Layer(nn.Module):
    """Eleven parameters: two norms, four projections with two biases, three linears of a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(DIM) for _ in range(2))
        self.mixing = nn.ModuleList(nn.Linear(DIM, DIM, bias=place < 2) for place in range(4))
        self.gated = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norms[0](x)
        for linear in self.mixing:
            h = linear(h)
        x = x + h
        h = self.norms[1](x)
        return x + self.gated[2](self.gated[0](h) * self.gated[1](h))


def model(num_layers: int, shard: Callable[[nn.Module], object] | None) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(*(Layer() for _ in range(num_layers)))
    if shard is not None:
        for layer in made:
            shard(layer)
        shard(made)
    return made


def cpu_ms(sharded: nn.Module, x: torch.Tensor) -> float:
    start_s = time.process_time()
    sharded(x).sum().backward()
    taken_s = time.process_time() - start_s
    for parameter in sharded.parameters():
        parameter.grad = None
    return taken_s * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--json", type=Path, help="write the results to this file too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    world = World(HashStore(), 0, WORLD_SIZE, backend="fake", timeout_s=1.0, device=torch.device("cpu"))
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    results: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "versions": f"disttrain {disttrain.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
    }
    with entered_world(world):
        mesh = disttrain.init_device_mesh("cpu", (WORLD_SIZE,))
        other_mesh = torch_mesh("cpu", (WORLD_SIZE,))
        cases = {
            "plain": model(options.layers, None).to(torch.bfloat16),
            "ours": model(
                options.layers, lambda one: fully_shard(one, mesh=mesh, mp_policy=MixedPrecisionPolicy(**dtypes))
            ),
            "torch": model(
                options.layers, lambda one: torch_fully_shard(one, mesh=other_mesh, mp_policy=TorchPolicy(**dtypes))
            ),
        }
        taken: dict[str, list[float]] = {name: [] for name in cases}
        x = torch.randn(2, DIM, dtype=torch.bfloat16)
        for round_number in range(options.rounds + 3):
            for name, case in cases.items():
                elapsed = cpu_ms(case, x)
                if round_number >= 3:
                    taken[name].append(elapsed / options.layers)
    plain = statistics.median(taken["plain"])
    for name in ("ours", "torch"):
        lower, median, upper = statistics.quantiles([value - plain for value in taken[name]], n=4)
        results[name] = {"median_ms": median, "lower_ms": lower, "upper_ms": upper}
        print(f"{name:8}{median:8.3f} ms per layer [{lower:.3f}, {upper:.3f}]")
    results["plain_ms"] = plain
    results["ratio"] = results["ours"]["median_ms"] / results["torch"]["median_ms"]
    print(f"ratio   {results['ratio']:8.3f}  (plain {plain:.3f} ms)")
    torch.distributed.destroy_process_group()
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
