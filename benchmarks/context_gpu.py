"""Attention of one long sequence over the GPUs of a host: each way, beside one rank's share alone and torch's own.

    disttrain-launch --standalone --nproc-per-node 4 benchmarks/context_gpu.py --out results.json

Forward and backward of causal attention in bf16, in turns. *share* is as much work on one rank without the others: n
ranks that hid all of their communication would take as long. *positions* is attention of as many positions as a rank
has, among themselves: its memory is the rank's share of what one process would take. `torch` is its context_parallel,
by an all-gather and by an all-to-all, where it serves the call. On CPUs, which it does not, small `--positions` show
that the rest runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed
import torch.nn.functional as F
from harness import Row, aligned, finish, row
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import _attention as torchs

import disttrain
from disttrain.context_parallel import CutPlan, plan_cut
from disttrain.kernels import Causal, attention
from disttrain.kernels.attention.context.planning.steps import HEADS, RING, WAYS

NUM_WARMUPS = 3


def main() -> None:
    options = _parser().parse_args()
    disttrain.init_process_group()
    device = disttrain.current_world().device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    size, rank = disttrain.get_world_size(), disttrain.get_rank()
    rows: list[Row] = []
    for num_positions in options.positions:
        cut = plan_cut(Causal(), num_positions, size)
        steps = _steps(options, cut, device)
        _drop_what_torch_refuses(steps)
        times: dict[str, list[float]] = {name: [] for name in steps}
        peaks: dict[str, int] = {}
        for number in range(options.rounds + NUM_WARMUPS):
            for name, step in steps.items():
                duration_s, peak = _measured(step, device)
                if number >= NUM_WARMUPS:
                    times[name].append(1e3 * duration_s)
                    peaks[name] = max(peaks.get(name, 0), peak)
        if rank == 0:
            rows += _rows(cut, times, peaks)
    if rank == 0:
        kind = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        finish(rows, options.out, machine=f"{size} x {kind}")
    torch.distributed.destroy_process_group()
    disttrain.destroy_process_group()


def _drop_what_torch_refuses(steps: dict[str, Callable[[], object]]) -> None:
    for name in [*steps]:
        try:
            steps[name]()
        except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
            # Torch's; all ranks find the same.
            if not name.startswith("torch"):
                raise
            del steps[name]
            if disttrain.get_rank() == 0:
                print(f"{name}: {str(error).splitlines()[0]}", flush=True)


def _steps(options: argparse.Namespace, cut: CutPlan, device: torch.device) -> dict[str, Callable[[], object]]:
    """All sides, by name."""
    size, rank = disttrain.get_world_size(), disttrain.get_rank()
    axis = disttrain.init_device_mesh(device.type, (size,), mesh_dim_names=("cp",))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def made(num_heads: int, num_positions: int) -> torch.Tensor:
        shape = (1, num_heads, num_positions, options.head_dim)
        return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)

    heads = (options.heads, options.kv_heads, options.kv_heads)
    tensors = [made(number, cut.parts.size(rank)) for number in heads]
    steps: dict[str, Callable[[], object]] = {}
    for way in WAYS:
        if way != HEADS or (options.heads % size == 0 and options.kv_heads % size == 0):
            steps[way] = lambda way=way: _both(
                lambda query, key, value: attention(query, key, value, Causal(), axis=axis, parts=cut.parts, way=way),
                tensors,
            )
    # Causal attention over S / sqrt(n) positions is an n-th of the work over S.
    share = [made(number, round(cut.parts.length / size**0.5)) for number in heads]
    steps["share"] = lambda: _both(lambda query, key, value: attention(query, key, value, Causal()), share)
    positions = [made(number, cut.parts.length // size) for number in heads]
    steps["positions"] = lambda: _both(lambda query, key, value: attention(query, key, value, Causal()), positions)
    mesh = init_device_mesh(device.type, (size,))
    if cut.parts.length % (2 * size) == 0:
        for method in ("allgather", "alltoall"):
            steps[f"torch {method}"] = lambda method=method: _torchs(method, mesh, cut.parts.length, tensors)
    return steps


def _both(attend: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> object:
    """Forward and backward."""
    attended = attend(*tensors)
    return torch.autograd.grad(attended, tensors, torch.ones_like(attended))


def _torchs(method: str, mesh: torch.distributed.DeviceMesh, num_positions: int, tensors: list[torch.Tensor]) -> object:
    torchs.set_rotate_method(method)
    positions = torch.arange(num_positions, device=tensors[0].device)
    # It serves calls of torch's function, of tensors that are cut by then.
    with torchs.context_parallel(mesh, buffers=[positions], buffer_seq_dims=[0], no_restore_buffers={positions}):
        return _both(
            lambda query, key, value: F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            ),
            tensors,
        )


def _measured(step: Callable[[], object], device: torch.device) -> tuple[float, int]:
    """Seconds of the slowest rank, and the bytes that this rank takes beside what it has."""
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if is_cuda else 0
    disttrain.barrier()
    begin = time.perf_counter()
    step()
    if is_cuda:
        torch.cuda.synchronize()
    slowest = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    disttrain.all_reduce(slowest, disttrain.ReduceOp.MAX)
    return float(slowest), (torch.cuda.max_memory_allocated() if is_cuda else 0) - before


def _rows(cut: CutPlan, times: dict[str, list[float]], peaks: dict[str, int]) -> list[Row]:
    """Prints all sides; returns times and memory of ours, which is the ring, and of the better of torch's two."""
    medians = {name: statistics.median(series) for name, series in times.items()}
    print(cut)
    heads = ("", "ms", "least", "of n ranks' speed", "MB", "of its share")
    cells = [
        (
            name,
            f"{median:.2f}",
            f"{min(times[name]):.2f}",
            f"{medians['share'] / median:.2f}",
            f"{peaks[name] / 1e6:.0f}",
            f"{peaks[name] / max(1, peaks['positions']):.2f}",
        )
        for name, median in medians.items()
    ]
    print(aligned(heads, cells), flush=True)
    torchs_two = [name for name in medians if name.startswith("torch")]
    named = {RING: "ours", **({min(torchs_two, key=medians.__getitem__): "torch"} if torchs_two else {})}
    shown = [*named, *WAYS[1:], "share"]
    sides = {named.get(name, name): times[name] for name in shown if name in times}
    # A rank's share of memory is that of its positions among themselves.
    bytes_of = {**peaks, "share": peaks["positions"]}
    memory = {named.get(name, name): [bytes_of[name]] for name in shown if name in times}
    length = f"{cut.parts.length:,} positions"
    return [row(f"forward and backward, {length}", "ms", sides), row(f"memory, {length}", "MB", memory, 1e-6)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, nargs="+", default=[32_768, 131_072])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="write a JSON file too")
    return parser


if __name__ == "__main__":
    main()
