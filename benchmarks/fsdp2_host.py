"""What sharding costs the host: ours and torch's under a transport without peers, in turn, in one process.

    python benchmarks/fsdp2_host.py [--rounds 20] [--layers 16] [--json FILE]

One iteration is a forward and a backward of layers with eleven parameters each, too small to compute for long. Figures
are of CPU time (of the whole process, whose autograd thread takes part); "plain" is the same model without sharding,
and taken away from both. Ours is as jobs run it, with the flight recorder, and "unrecorded" without.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from harness import OURS, TORCH, command_line, finish, in_turns, row
from torch import nn
from torch.distributed.device_mesh import init_device_mesh as torch_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from without_peers import UNRECORDED, unrecorded, without_peers

import disttrain
from disttrain.fsdp2 import MixedPrecisionPolicy, fully_shard

WORLD_SIZE = 8
DIM = 16
PLAIN = "plain"


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
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--layers", type=int, default=16)
    options = parser.parse_args()
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    with without_peers(WORLD_SIZE):
        mesh = disttrain.init_device_mesh("cpu", (WORLD_SIZE,))
        other_mesh = torch_mesh("cpu", (WORLD_SIZE,))
        policy, torch_policy = MixedPrecisionPolicy(**dtypes), TorchPolicy(**dtypes)
        models = {
            PLAIN: model(options.layers, None).to(torch.bfloat16),
            OURS: model(options.layers, lambda one: fully_shard(one, mesh=mesh, mp_policy=policy)),
            TORCH: model(options.layers, lambda one: torch_fully_shard(one, mesh=other_mesh, mp_policy=torch_policy)),
        }
        x = torch.randn(2, DIM, dtype=torch.bfloat16)
        calls = {side: partial(cpu_ms, one, x) for side, one in models.items()}
        taken = in_turns({**calls, UNRECORDED: unrecorded(calls[OURS])}, options.rounds, 3)
    plain = statistics.median(taken[PLAIN])
    added = {side: [value - plain for value in taken[side]] for side in (OURS, TORCH, UNRECORDED)}
    rows = [row("added by sharding, per layer", "ms of CPU", added, 1 / options.layers)]
    rows.append(row("a layer without sharding", "ms of CPU", {PLAIN: taken[PLAIN]}, 1 / options.layers))
    finish(rows, options.json)


if __name__ == "__main__":
    main()
