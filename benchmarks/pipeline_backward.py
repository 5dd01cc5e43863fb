"""What it costs to split a backward: one decoder layer, forward and backward, plain, split, and by torch's own way.

    python benchmarks/pipeline_backward.py [--dim 4096 --seq 4096 --dtype bfloat16]

Per layer of a stage of `--layers` layers, and what a split adds to a plain backward. On the CPU use small sizes: then
it is the cost of calls that shows.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from harness import OURS, TORCH, command_line, finish, row
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from disttrain.pipelining.model.backward import Backward
from disttrain.pipelining.model.layers import split_layers


class Layer(nn.Module):
    """Llama's."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.head_dim = dim // num_heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        kv = self.head_dim * num_kv_heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, width, bias=False) for width in (dim, kv, kv, dim))
        self.gate, self.up, self.down = (
            nn.Linear(a, b, bias=False) for a, b in ((dim, hidden), (dim, hidden), (hidden, dim))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.attention_norm(x)
        q, k, v = (m(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for m in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def timed(run: Callable[[], None], device: torch.device) -> float:
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def ways(stage: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> dict[str, dict[str, Callable[[], None]]]:
    """Of each way its steps, in order."""
    split = copy.deepcopy(stage)
    split_layers(split)
    state: dict[str, Any] = {}

    def forward() -> None:
        state["x"] = x.detach().requires_grad_()
        state["y"] = stage(state["x"])

    def our_forward() -> None:
        state["x"], state["backward"] = x.detach().requires_grad_(), Backward()
        with state["backward"].forward():
            state["y"] = split(state["x"])

    def our_input() -> None:
        state["backward"].backward_input([state.pop("y")], [grad], [state["x"]])

    def our_weight() -> None:
        state["backward"].backward_weight()

    def torch_weight() -> None:
        stage_backward_weight(stage.parameters(), state.pop("groups"))

    def torch_input() -> None:
        _, state["groups"] = stage_backward_input([state.pop("y")], [grad], [state["x"]], stage.parameters())

    return {
        "plain": {"F": forward, "B": lambda: state.pop("y").backward(grad)},
        OURS: {"F": our_forward, "I": our_input, "W": our_weight},
        TORCH: {
            "F": forward,
            "I": torch_input,
            "W": torch_weight,
        },
    }


def peaks(all_ways: dict[str, dict[str, Callable[[], None]]]) -> dict[str, dict[str, float]]:
    """GiB of activations and what else is kept after each step, over what is there before the first."""
    found: dict[str, dict[str, float]] = {}
    for name, steps in all_ways.items():
        before = torch.cuda.memory_allocated()
        found[name] = {}
        for step, run in steps.items():
            run()
            found[name][step] = round((torch.cuda.memory_allocated() - before) / 2**30, 3)
    return found


def main() -> None:
    parser = command_line(__doc__)
    for name, default in (
        ("dim", 64),
        ("heads", 4),
        ("kv", 2),
        ("hidden", 128),
        ("seq", 16),
        ("layers", 4),
        ("runs", 30),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    stage = nn.Sequential(
        *(Layer(options.dim, options.heads, options.kv, options.hidden) for _ in range(options.layers))
    ).to(device, getattr(torch, options.dtype))
    x = torch.randn(1, options.seq, options.dim, device=device, dtype=getattr(torch, options.dtype))
    all_ways = ways(stage, x, torch.randn_like(x))
    times: dict[str, dict[str, list[float]]] = {name: {step: [] for step in steps} for name, steps in all_ways.items()}
    for run_number in range(options.runs + 3):
        for name, steps in all_ways.items():
            for step, run in steps.items():
                seconds = timed(run, device)
                if run_number >= 3:
                    times[name][step].append(seconds)
    totals = {name: [sum(of) for of in zip(*steps.values(), strict=True)] for name, steps in times.items()}
    plain = statistics.median(totals["plain"])
    added = {name: [each - plain for each in totals[name]] for name in (OURS, TORCH)}
    rows = [
        row("forward and backward of a layer", "ms", totals, 1e3 / options.layers),
        row("what the split adds to a layer", "ms", added, 1e3 / options.layers),
    ]
    if device.type == "cuda":
        kept = peaks(all_ways)
        rows += [
            row(f"kept after {step}", "GiB", {name: [of[step]] for name, of in kept.items() if step in of})
            for step in ("F", "I")
        ]
    finish(
        rows,
        options.json,
        device=str(device),
        sizes={name: value for name, value in vars(options).items() if name != "json"},
    )


if __name__ == "__main__":
    main()
