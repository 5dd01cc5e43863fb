"""Each kernel against torch's operators, one by one and compiled by Inductor, and against memory's speed.

All are measured in turn, in one run, and among them a copy that moves as many bytes: the floor. On a GPU each step is a
CUDA graph that is replayed behind other work, which leaves nothing of the inputs in the cache: so the host's time does
not count, for any of them, nor what the step before has left.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from kernels.cases import Case, Step

from disttrain.kernels._torch import copy_each
from disttrain.kernels.copies.operator import copy_all
from disttrain.kernels.optimizers.fused import AdamW

NUM_ROUNDS: Final = 20
_COPY_BYTES: Final = 1 << 30
_NUM_REPEATS: Final = 4
"""How often a step that memory bounds runs in one measurement: what one has left in the cache, the next writes back."""


@dataclass(frozen=True)
class Measured:
    """Median seconds of each contender, and the most memory that a step takes above its inputs, in bytes."""

    name: str
    is_whole_step: bool
    seconds: dict[str, float]
    peak_bytes: dict[str, int]
    moved_bytes: int
    flops: int

    @property
    def share_of_copy(self) -> float:
        return self.seconds["copy"] / self.seconds["kernel"]


def copy_bytes_per_s(device: torch.device) -> float:
    """What a large copy reads and writes per second."""
    moved = 2 * (_COPY_BYTES if device.type == "cuda" else _COPY_BYTES >> 4)
    return moved / _medians({"copy": _copy(moved, device)}, _cold(device), device)["copy"]


def measure(case: Case, device: torch.device) -> Iterator[Measured]:
    """Of forward alone, and of forward and backward."""
    torch.compiler.reset()
    contenders = {"eager": case.theirs, "inductor": torch.compile(case.theirs), "kernel": case.ours}
    before = _cold(device)
    for is_whole in (False, True):
        if not (case.step_bytes or case.flops if is_whole else case.forward_bytes):
            continue
        make = _whole_step if is_whole else _forward
        steps = {name: make(run, case) for name, run in contenders.items()}
        peaks = {name: _peak_bytes(step, device) for name, step in steps.items()}
        moved = case.step_bytes if is_whole else case.forward_bytes
        num_repeats = _NUM_REPEATS if moved else 1
        runs = {name: _prepared(_repeated(step, num_repeats), device) for name, step in steps.items()}
        if moved:
            runs["copy"] = _repeated(_copy(moved, device), num_repeats)
        medians = {name: seconds / num_repeats for name, seconds in _medians(runs, before, device).items()}
        yield Measured(case.name, is_whole, medians, peaks, moved, case.flops if is_whole else 0)


def measure_adamw(device: torch.device, num_parameters: int, num_elements: int) -> Iterator[Measured]:
    """A step of AdamW, all in fp32 and all in bf16, as torch's have it; its fused one stands for Inductor.

    A step is not recorded. The device has work before it, as in training, so the host's time does not count.
    """
    before = _busy(device)
    for dtype in (torch.float32, torch.bfloat16):
        steps: dict[str, Callable[[], Any]] = {}
        for name, make in (
            ("eager", partial(torch.optim.AdamW, foreach=True)),
            ("inductor", partial(torch.optim.AdamW, fused=True)),
            ("kernel", partial(AdamW, state_dtype=dtype, keep_master=False)),
        ):
            parameters = [torch.ones(num_elements, dtype=dtype, device=device) for _ in range(num_parameters)]
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            steps[name] = make(parameters).step
        # Parameter and averages are read and written, the gradient read.
        moved = 7 * dtype.itemsize * num_elements * num_parameters
        medians = _medians({**steps, "copy": _copy(moved, device)}, before, device)
        name = f"AdamW {num_parameters} x {num_elements} {str(dtype).removeprefix('torch.')}"
        yield Measured(name, True, medians, dict.fromkeys(medians, 0), moved, 0)


def measure_packing(device: torch.device, dim: int) -> Iterator[Measured]:
    """A block's gradients in bf16, copied to fp32 as they are summed over ranks; torch's list of copies is eager's."""
    shapes = [(dim, dim), (dim // 4, dim), (dim // 4, dim), (dim, dim), *[(dim * 7 // 2, dim)] * 3, (dim,), (dim,)]
    sources = [torch.ones(shape, dtype=torch.bfloat16, device=device) for shape in shapes]
    targets = [torch.empty_like(source, dtype=torch.float32) for source in sources]
    copies: dict[str, Callable[[], Any]] = {
        "eager": partial(copy_each, targets, sources),
        "inductor": torch.compile(lambda: copy_each(targets, sources)),
        "kernel": partial(copy_all, targets, sources),
    }
    moved = sum(tensor.nbytes for tensor in (*sources, *targets))
    medians = _medians({**copies, "copy": _copy(moved, device)}, _busy(device), device)
    yield Measured(f"pack a block of dim {dim}, bf16 to fp32", False, medians, dict.fromkeys(medians, 0), moved, 0)


def _forward(run: Step, case: Case) -> Callable[[], Any]:
    def step() -> Any:
        with torch.no_grad():
            return run(*case.inputs)

    return step


def _whole_step(run: Step, case: Case) -> Callable[[], Any]:
    with torch.no_grad():
        results = run(*case.inputs)
    grads = [torch.ones_like(one) for one in (results if isinstance(results, tuple) else (results,))]

    def step() -> Any:
        return torch.autograd.grad(run(*case.inputs), case.inputs, grads)

    return step


def _peak_bytes(step: Callable[[], Any], device: torch.device) -> int:
    """0 on CPUs, where nobody counts."""
    step()
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - before


def _repeated(step: Callable[[], Any], num_repeats: int) -> Callable[[], Any]:
    def run() -> None:
        for _ in range(num_repeats):
            step()

    return run


def _prepared(step: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """`step` after its first times; on a GPU recorded as a graph."""
    if device.type != "cuda":
        step()
        return step
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _copy(moved_bytes: int, device: torch.device) -> Callable[[], Any]:
    """Reads and writes so many bytes, not in a graph: there a GPU copies by its engines, which are slower."""
    source = torch.ones(moved_bytes // 2, dtype=torch.uint8, device=device)
    return partial(torch.empty_like(source).copy_, source)


def _medians(runs: dict[str, Callable[[], Any]], before: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Seconds of each, after a first time, in turn and each after `before`."""
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(NUM_ROUNDS):
        for name, run in runs.items():
            before()
            times[name].append(_seconds(run, device))
    return {name: statistics.median(found) for name, found in times.items()}


def _cold(device: torch.device) -> Callable[[], Any]:
    """Gives a GPU work while the host starts the next step, and its cache other lines, which need no writing."""
    if device.type != "cuda":
        return lambda: None
    return partial(torch.amax, torch.ones(_COPY_BYTES // 4, device=device))


def _busy(device: torch.device) -> Callable[[], Any]:
    """Gives a GPU some milliseconds of work."""
    if device.type != "cuda":
        return lambda: None
    matrix = torch.ones(8192, 8192, dtype=torch.bfloat16, device=device)

    def run() -> None:
        for _ in range(4):
            torch.mm(matrix, matrix)

    return run


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begun.record()
    run()
    ended.record()
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1e3
