"""This machine's rates, measured in some seconds: products, attention and copies on one GPU, and where the launcher has
started several ranks, a ring over all of them.

    python -m disttrain.plan --measure mine.json
    disttrain-launch --standalone --nproc-per-node gpu -m disttrain.plan --measure mine.json

Over ranks on several nodes the ring's rate is the network's; within a node it is that of its links.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from disttrain.errors import SettingError
from disttrain.plan.time.collective_times import Link
from disttrain.plan.time.hardware import Hardware
from disttrain.process_group import all_gather_into_tensor as all_gather
from disttrain.process_group import destroy_process_group, get_rank, get_world_size, init_process_group
from disttrain.settings import LOCAL_RANK, LOCAL_WORLD_SIZE, WORLD_SIZE

_GIB = 2**30


@dataclass(frozen=True)
class Sizes:
    """Of what is measured: large enough that rates no longer grow."""

    matrix: int = 8192
    seq: int = 8192
    heads: int = 32
    head_size: int = 128
    copied_bytes: int = 1 << 30
    gathered_bytes: int = 1 << 30
    num_runs: int = 10
    settling_s: float = 0.5


def measure(base: Hardware) -> Hardware | None:
    """`base` with what can be measured here; None on ranks other than the first. Every rank must call.

    Raises: SettingError where there is no GPU.
    """
    if not torch.cuda.is_available():
        raise SettingError("plan --measure", "There is no GPU here.", "Give rates: --tflops, --memory-gb, --node-gb.")
    device = torch.device("cuda", LOCAL_RANK.read() or 0)
    torch.cuda.set_device(device)
    changes: dict[str, Any] = {
        "name": torch.cuda.get_device_name(device),
        "memory_gib": torch.cuda.get_device_properties(device).total_memory / _GIB,
        "num_multiprocessors": torch.cuda.get_device_properties(device).multi_processor_count,
        **rates_of(device, Sizes()),
    }
    if (WORLD_SIZE.read() or 1) == 1:
        return replace(base, **changes)
    init_process_group()
    try:
        is_one_node = (LOCAL_WORLD_SIZE.read() or 1) == get_world_size()
        num_nodes = get_world_size() // (LOCAL_WORLD_SIZE.read() or 1)
        changes |= ring_of(device, Sizes(), "node" if is_one_node else "network")
        # What is known of a hardware's latency is that of the first hop.
        further = Link(0.0, 1.0, get_world_size(), num_nodes, base.node_step_s, base.network_step_s)
        latency = "node_latency_s" if is_one_node else "network_latency_s"
        changes[latency] = max(0.0, changes[latency] - further.gather_latency_s)
        return replace(base, **changes) if get_rank() == 0 else None
    finally:
        destroy_process_group()


def rates_of(device: torch.device, sizes: Sizes) -> dict[str, float]:
    """FLOP/s of products and of causal attention, and bytes read and written per second by a copy, on one device."""
    num = sizes.matrix
    left, right = (torch.randn(num, num, device=device, dtype=torch.bfloat16) for _ in range(2))
    shape = 1, sizes.heads, sizes.seq, sizes.head_size
    query, key, value = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    grad = torch.randn(shape, device=device, dtype=torch.bfloat16)
    source = torch.empty(sizes.copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def attend_and_back() -> None:
        torch.autograd.grad(attend(), (query, key, value), grad)

    def seconds(run: Callable[[], object]) -> float:
        return _seconds(run, device, sizes)

    attention = 2.0 * sizes.heads * sizes.head_size * sizes.seq**2
    forward_s = seconds(attend)
    return {
        "matmul_flops": 2.0 * num**3 / seconds(lambda: left @ right),
        "attention_forward_flops": attention / forward_s,
        "attention_backward_flops": 2.5 * attention / max(1e-9, seconds(attend_and_back) - forward_s),
        "memory_bytes_per_s": 2.0 * sizes.copied_bytes / seconds(lambda: target.copy_(source)),
    }


def ring_of(device: torch.device, sizes: Sizes, where: str) -> dict[str, float]:
    """Measures the bytes that a rank sends per second of a large gather, and the time of a small one. Collective."""
    num_ranks = get_world_size()
    part = torch.empty(sizes.gathered_bytes // num_ranks, dtype=torch.uint8, device=device)
    whole = torch.empty(part.numel() * num_ranks, dtype=torch.uint8, device=device)
    # As often on all ranks, which their clocks would not say.
    rounds = replace(sizes, settling_s=0.0)
    few = torch.empty(64 * num_ranks, dtype=torch.uint8, device=device)
    latency_s = _seconds(lambda: all_gather(few, few[:64].clone()), device, rounds)
    whole_s = _seconds(lambda: all_gather(whole, part), device, rounds)
    sent_bytes = part.numel() * (num_ranks - 1)
    return {f"{where}_bytes_per_s": sent_bytes / max(1e-9, whole_s - latency_s), f"{where}_latency_s": latency_s}


def _seconds(run: Callable[[], object], device: torch.device, sizes: Sizes) -> float:
    """Of one run: the median of three rounds without a pause, after rounds for some time that are not counted.

    A GPU that has rested is faster than one whose power has brought its clock down, as that of a step has: a product of
    8192 x 8192 attains 784 TFLOP/s on a rested H200, 690 on one at work.
    """
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 3:
        _wait(device)
        begin = time.perf_counter()
        for _ in range(sizes.num_runs):
            run()
        _wait(device)
        end = time.perf_counter()
        if begin - start > sizes.settling_s:
            times.append((end - begin) / sizes.num_runs)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
