"""What a layer of experts costs the host, without what it launches: on CPUs, with kernels that only allocate.

    python benchmarks/experts_host.py [--rounds 30] [--calls 40] [--profile] [--json FILE]

Forward and backward of `Experts`: of all experts here, and of those along an axis of four ranks under a transport
without peers, by each way to exchange rows. Kernels and products give memory of the right shape that nobody writes, so
that figures are of what Python, autograd and the door of collectives do; a GPU machine adds its launches. How many rows
ranks send each other is new at each call, as in training. "matrix product" is one of torch's own, with its
backward, as a measure of the machine. Figures are of CPU time (of the whole process, whose autograd thread takes part)
per forward and backward.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import cycle
from typing import Any
from unittest import mock

import torch
from harness import command_line, finish, in_turns, row
from without_peers import unrecorded, without_peers

import disttrain
from disttrain.experts import Experts, shard_experts
from disttrain.kernels.grouped import choice

WORLD_SIZE = 4
NUM_ROUTINGS = 5000
NUM_EXPERTS, TOP_K, DIM, HIDDEN, TOKENS = 8, 2, 16, 16, 32


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--profile", action="store_true", help="show where the time of each layer goes instead")
    options = parser.parse_args()
    with without_peers(WORLD_SIZE), unwritten():
        mesh = disttrain.init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("ep",))
        cases = {"all here": stepping(Experts(NUM_EXPERTS, DIM, HIDDEN))}
        for way in ("all_to_all", "padded"):
            layer = Experts(NUM_EXPERTS, DIM, HIDDEN)
            shard_experts(layer, mesh, exchange=way, src_data_rank=None)
            cases[way] = stepping(layer)
        cases["matrix product"] = product_step()
        if options.profile:
            for name, step in cases.items():
                show(name, step)
            return
        calls: dict[str, Callable[[], float]] = {
            name: partial(cpu_us, step, options.calls) for name, step in cases.items()
        }
        calls["all_to_all, unrecorded"] = unrecorded(calls["all_to_all"])
        taken = in_turns(calls, options.rounds, 3)
    finish([row("layer", "us of CPU", taken)], options.json)


def stepping(layer: Experts) -> Callable[[], None]:
    """A forward and a backward of a layer."""
    x = torch.randn(TOKENS, DIM, requires_grad=True)
    weights, indices = torch.randn(TOKENS, NUM_EXPERTS).softmax(-1).topk(TOP_K)
    weights.requires_grad_()
    leaves, wish = [x, weights, *layer.parameters()], torch.randn_like(x)

    def step() -> None:
        layer(x, indices, weights).backward(wish)
        for leaf in leaves:
            leaf.grad = None

    return step


def product_step() -> Callable[[], None]:
    """A forward and a backward of a linear layer."""
    x, weight, wish = (
        torch.randn(TOKENS, DIM),
        torch.randn(HIDDEN, DIM, requires_grad=True),
        torch.randn(TOKENS, HIDDEN),
    )

    def step() -> None:
        (x @ weight.T).backward(wish)
        weight.grad = None

    return step


@contextmanager
def unwritten() -> Iterator[None]:
    """Kernels that only allocate, in the place of all that a layer launches."""
    kernels = Unwritten()

    def known(*_: object) -> Unwritten:
        return kernels

    def yes(_: object) -> bool:
        return True

    exchange = "disttrain.experts.exchange"
    with (
        mock.patch.object(choice, "_REFERENCE", kernels),
        mock.patch(f"{exchange}.sizes.launches", yes),
        mock.patch(f"{exchange}.arrangement.launches", yes),
        mock.patch(f"{exchange}.sizes.triton_kernels", known),
        mock.patch(f"{exchange}.arrangement.triton_kernels", known),
    ):
        yield


class Unwritten:
    """`Kernels` for experts, and those of the exchange's kernels."""

    @staticmethod
    def sort(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, ...]:
        numbers = torch.arange(experts.shape[0])
        share = experts.shape[0] // num_experts
        ends = torch.arange(share, share * num_experts + 1, share, dtype=torch.int32)
        return numbers, numbers, ends

    @staticmethod
    def take(x: torch.Tensor, order: torch.Tensor, ends: Any, k: int, scales: Any) -> torch.Tensor:
        return x.new_empty(order.shape[0], x.shape[1])

    @staticmethod
    def combine(rows: torch.Tensor, slots: torch.Tensor, ends: Any, k: int, weights: Any) -> torch.Tensor:
        return rows.new_empty(slots.shape[0] // k, rows.shape[1])

    @staticmethod
    def products_with(grad: Any, rows: torch.Tensor, slots: torch.Tensor, ends: Any, k: int) -> torch.Tensor:
        return torch.empty(slots.shape[0])

    @staticmethod
    def product(x: torch.Tensor, weight: torch.Tensor, ends: Any, is_transposed: bool) -> torch.Tensor:
        return x.new_empty(x.shape[0], weight.shape[2 if is_transposed else 1])

    @staticmethod
    def outer(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])

    @staticmethod
    def clear_past(rows: torch.Tensor, ends: Any) -> torch.Tensor:
        return rows

    @staticmethod
    def gated(gate: torch.Tensor, *_: Any) -> torch.Tensor:
        return gate.new_empty(gate.shape)

    @staticmethod
    def gated_backward(grad: torch.Tensor, gate: Any, up: Any, ends: Any, form: Any, order: Any, *_: Any) -> Any:
        return grad, None if order is None else torch.empty(order.shape[0])

    @staticmethod
    def pack(ends: torch.Tensor, finding: Any, num_ranks: int, chunk: int, tag: int) -> torch.Tensor:
        return next(drawn_sizes(num_ranks, chunk))

    @staticmethod
    def arrange(counts: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, ...]:
        numbers = torch.arange(num_rows)
        return numbers, numbers, torch.full((counts.shape[1],), num_rows, dtype=torch.int32)


@cache
def drawn_sizes(num_ranks: int, chunk: int) -> Iterator[torch.Tensor]:
    """Sizes of routings, drawn beforehand, which no two calls of a benchmark share."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(num_ranks * chunk, (NUM_ROUTINGS, TOKENS * TOP_K), generator=generator)
    counts = torch.nn.functional.one_hot(targets, num_ranks * chunk).sum(1).view(-1, num_ranks, chunk).double()
    lines = torch.cat((counts, counts.sum(2, keepdim=True), counts.new_zeros((*counts.shape[:2], 1))), 2)
    return cycle(lines[:, None].repeat(1, 2, 1, 1).unbind())


def cpu_us(step: Callable[[], None], num_calls: int) -> float:
    start_s = time.process_time()
    for _ in range(num_calls):
        step()
    return (time.process_time() - start_s) / num_calls * 1e6


def show(name: str, step: Callable[[], None], num_calls: int = 300) -> None:
    """Where the time of a step goes, as cProfile sees it."""
    for _ in range(20):
        step()
    profile = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        profile.enable()
        for _ in range(num_calls):
            step()
        profile.disable()
    print(f"{name}, {num_calls} steps")
    pstats.Stats(profile).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
