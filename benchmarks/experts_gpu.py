"""Experts' products beside a dense product of as many operations, and a layer beside one of torch's own operators.

    python benchmarks/experts_gpu.py [--tokens 16384] [--float8] [--out FILE]

The layer is measured forward and backward with uneven routing; its reference is
`benchmarks/experts/reference.py`, as it is and compiled. `host` is the time until the host has launched a layer's
forward and backward.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from experts import reference
from harness import asked, flags_of, keep

from disttrain.console import size_text, write
from disttrain.kernels.grouped.choice import outer, product
from disttrain.kernels.grouped.form import GatedForm
from disttrain.kernels.grouped.products import mix_experts
from disttrain.kernels.grouped.rows import sort_by_expert

SHAPES = ((64, 8, 2048, 1408), (64, 8, 4096, 2048), (64, 1, 2048, 1408), (128, 8, 2048, 768), (8, 2, 4096, 14336))
"""Experts, choices of a token, dim and hidden size."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--float8", action="store_true", help="the layer in float8 too, by both recipes")
    parser.add_argument("--out", type=Path, help="write a JSON file too")
    options = parser.parse_args(argv)
    write(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.tokens} tokens")
    results = []
    for shape in SHAPES:
        torch.manual_seed(0)
        recipes = ("tensorwise", "rowwise") if options.float8 else ()
        for measured in (_products(options.tokens, *shape), _layer(options.tokens, *shape, recipes)):
            write("  ".join(f"{name} {value}" for name, value in measured.items()))
            results.append(measured)
            torch.cuda.empty_cache()
    if options.out:
        report = {"machine": torch.cuda.get_device_name(), "command": asked(), "arguments": flags_of(options)}
        keep({**report, "results": results}, options.out)
    return 0


def _products(num_tokens: int, num_experts: int, k: int, dim: int, hidden: int) -> dict[str, Any]:
    """TFLOP/s of the products of rows with (hidden, dim), dense and by expert, each way."""
    rows = num_tokens * k
    x, grad = (torch.randn(rows, size, device="cuda", dtype=torch.bfloat16) for size in (dim, hidden))
    weight = torch.randn(num_experts, hidden, dim, device="cuda", dtype=torch.bfloat16)
    ends = sort_by_expert(torch.randint(0, num_experts, (rows,), device="cuda"), num_experts).ends
    one = weight[0].contiguous()
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "forward": (lambda: x @ one.T, lambda: product(x, weight, ends, False)),
        "of x": (lambda: grad @ one, lambda: product(grad, weight, ends, True)),
        "of weights": (lambda: grad.T @ x, lambda: outer(grad, x, ends)),
    }
    flops = 2 * rows * dim * hidden
    measured: dict[str, Any] = {"products": f"{num_experts} x {hidden} x {dim}, {rows} rows"}
    for name, both in pairs.items():
        dense, grouped = (flops / seconds / 1e12 for seconds in _seconds(both))
        measured[name] = f"{grouped:.0f} of {dense:.0f} TFLOP/s ({grouped / dense:.2f})"
    return measured


def _layer(
    num_tokens: int, num_experts: int, k: int, dim: int, hidden: int, recipes: Sequence[str] = ()
) -> dict[str, Any]:
    """Milliseconds, peak memory and host time of a layer's forward and backward, ours, in float8, and torch's."""
    x = torch.randn(num_tokens, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    scores = torch.randn(num_tokens, num_experts, device="cuda").softmax(-1)
    weights, indices = scores.topk(k)
    weights.requires_grad_()
    gate_up = (
        torch.randn(num_experts, 2 * hidden, dim, device="cuda", dtype=torch.bfloat16) * dim**-0.5
    ).requires_grad_()
    down = (torch.randn(num_experts, dim, hidden, device="cuda", dtype=torch.bfloat16) * hidden**-0.5).requires_grad_()
    gate, up = (half.contiguous().detach().requires_grad_() for half in gate_up.chunk(2, 1))
    wish = torch.randn_like(x)
    compiled = torch.compile(reference.mixture)
    form = GatedForm()

    def mixed(recipe: str) -> torch.Tensor:
        return mix_experts(x, sort_by_expert(indices, num_experts), weights, gate_up, down, form, float8=recipe)

    runs: dict[str, tuple[Callable[[], torch.Tensor], list[torch.Tensor]]] = {
        "ours": (partial(mixed, ""), [x, weights, gate_up, down]),
        "torch": (lambda: reference.mixture(x, indices, weights, gate, up, down), [x, weights, gate, up, down]),
        "torch compiled": (lambda: compiled(x, indices, weights, gate, up, down), [x, weights, gate, up, down]),
    }
    for recipe in recipes:
        runs[f"float8 {recipe}"] = (partial(mixed, recipe), [x, weights, gate_up, down])
    steps = {name: _step(run, leaves, wish) for name, (run, leaves) in runs.items()}
    expected, actual = (runs[name][0]().detach().float() for name in ("torch", "ours"))
    error = float((actual - expected).norm() / expected.norm())
    seconds = dict(zip(steps, _seconds(tuple(steps.values())), strict=True))
    measured: dict[str, Any] = {
        "layer": f"{num_experts} experts, top {k}, {dim} x {hidden}",
        "difference": f"{error:.4f}",
    }
    for name, step in steps.items():
        peak, host = _peak_bytes(step), _host_seconds(step)
        ratio = seconds[name] / seconds["ours"]
        measured[name] = f"{1e3 * seconds[name]:.2f} ms ({ratio:.2f}), {size_text(peak)}, host {1e6 * host:.0f} us"
    return measured


def _step(run: Callable[[], torch.Tensor], leaves: list[torch.Tensor], wish: torch.Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(run(), leaves, wish)


def _seconds(functions: Sequence[Callable[[], object]], turns: int = 5, calls: int = 10) -> list[float]:
    """The median time of each, in turns."""
    times: list[list[float]] = [[] for _ in functions]
    for function in functions:
        for _ in range(3):
            function()
    for _ in range(turns):
        for function, series in zip(functions, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            for _ in range(calls):
                function()
            end.record()
            torch.cuda.synchronize()
            series.append(begin.elapsed_time(end) / calls / 1e3)
    return [sorted(series)[len(series) // 2] for series in times]


def _peak_bytes(step: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - before


def _host_seconds(step: Callable[[], object], calls: int = 8) -> float:
    """The least time in which the host launches a step, while the GPU is idle enough to take it."""
    best = float("inf")
    for _ in range(calls):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        best = min(best, time.perf_counter() - begin)
    torch.cuda.synchronize()
    return best


if __name__ == "__main__":
    sys.exit(main())
