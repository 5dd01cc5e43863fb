"""What the ranks of a network's benchmark do: steps of both sides in turns, at each weather, told as they come.

A time is the slowest rank's, a loss the mean of all ranks'. All ranks end together once `--seconds` are over: what is
measured by then has been told.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from harness import OURS, TORCH, Row, brief, row
from networks.sides import PARALLELISMS, Step, in_pairs, make_step, num_parameters, sizes_of

import disttrain

NUM_WARMUPS = 2
BYTES_PER_PARAMETER = 20
"""Parameter, gradient and two averages of 4 bytes each, and what is gathered and packed."""


@dataclass(frozen=True)
class Weather:
    """A packet's delay one way, and what a host may send; 0: as much as it can."""

    delay_ms: float = 0.0
    mbit_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.delay_ms:g} ms" + (f", {self.mbit_s:g} Mbit/s" if self.mbit_s else "")


@dataclass(frozen=True)
class Found:
    """Of one case: each side's times and its losses, of all steps that counted."""

    case: str
    times_s: dict[str, list[float]]
    losses: dict[str, list[float]]

    @property
    def row(self) -> Row:
        return row(self.case, "ms", self.times_s, 1e3)

    @property
    def loss_gap(self) -> float:
        """The largest difference between the sides' losses of one step, of the loss."""
        ours, torchs = self.losses.get(OURS, []), self.losses.get(TORCH, [])
        return max((abs(one - other) / abs(other) for one, other in zip(ours, torchs, strict=False)), default=0.0)

    def line(self) -> str:
        sides = "  ".join(
            f"{side} {brief(1e3 * statistics.median(times)):>6} ms [{brief(1e3 * min(times))},"
            f" {brief(1e3 * max(times))}]"
            for side, times in self.times_s.items()
        )
        ratio = "" if self.row.ratio is None else f"  torch / ours {1 / self.row.ratio:.3f}"
        last = next(iter(self.losses.values()))[-1]
        return f"{self.case:44} {sides}{ratio}  loss {last:.4f}, apart by {self.loss_gap:.1e}"


Tell = Callable[[Found], None]


class Clock:
    """When the time is over, for all ranks alike."""

    def __init__(self, limit_s: float) -> None:
        self._end_s = time.monotonic() + limit_s

    def is_over(self) -> bool:
        """Collective: whether it is for any rank."""
        return _largest([float(time.monotonic() > self._end_s)])[0] > 0


def add_options(parser: argparse.ArgumentParser, **defaults: object) -> None:
    """What the ranks need to know."""
    parser.add_argument("--parallelisms", nargs="+", choices=PARALLELISMS, default=list(PARALLELISMS))
    parser.add_argument("--sides", nargs="+", choices=(TORCH, OURS), default=[TORCH, OURS])
    parser.add_argument("--dims", type=int, nargs="+", default=[128])
    parser.add_argument("--layers", type=int, nargs="+", default=[12])
    for name, value in {"heads": 0, "kv-heads": 0, "ffn": 0, "vocab": 512, "seq": 64, "batch": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value, help="" if value else "0: as the dim asks for")
    parser.add_argument("--microbatches", type=int, default=4, help="of a pipeline's step")
    parser.add_argument("--dtype", default="float32", help="what is computed in; sharded parameters are kept in fp32")
    parser.add_argument("--compile", action="store_true", help="the blocks, on both sides")
    parser.add_argument("--form", help="how ours gathers and reduces a group: fully_shard's argument")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no round after so many")
    parser.set_defaults(**defaults)


def run(
    options: argparse.Namespace, weathers: Sequence[Weather], change: Callable[[Weather], None], tell: Tell
) -> None:
    """All cases of these ranks; `change` makes the weather. Collective."""
    clock = Clock(options.seconds)
    for parallelism in options.parallelisms:
        for dim in options.dims:
            for num_layers in options.layers:
                chosen = argparse.Namespace(**{**vars(options), "dim": dim, "layers": num_layers})
                change(weathers[0])
                if clock.is_over():
                    _say(f"the rest is left out: {options.seconds:g} s are over")
                    return
                if reason := _refusal(parallelism, chosen):
                    _say(f"{name_of(parallelism, chosen)}: left out, {reason}")
                    continue
                _measure(parallelism, chosen, weathers, change, tell, clock)
                _let_go(options.device)


def name_of(parallelism: str, options: argparse.Namespace) -> str:
    return f"{parallelism}, {disttrain.get_world_size()} ranks, dim {options.dim} x {options.layers}"


def _refusal(parallelism: str, options: argparse.Namespace) -> str:
    """Why it cannot run, alike on all ranks."""
    num_ranks, sizes = disttrain.get_world_size(), sizes_of(options)
    if in_pairs(parallelism) and (num_ranks < 4 or num_ranks % 2):
        return "it takes two pairs of ranks"
    if parallelism == "tp" and (sizes.kv_heads % num_ranks or sizes.seq % num_ranks or sizes.ffn % num_ranks):
        return f"{sizes.kv_heads} heads or {sizes.seq} tokens do not divide by {num_ranks}"
    if parallelism == "pp" and sizes.layers < num_ranks:
        return "a stage would have no layer"
    if options.device == "cuda":
        free = -_largest([-float(torch.cuda.mem_get_info()[0])])[0]
        # All ranks of a GPU together: as if each GPU had its part of all ranks.
        num_gpus = min(torch.cuda.device_count(), num_ranks)
        needed = num_parameters(sizes) * BYTES_PER_PARAMETER * len(options.sides) / num_gpus
        if needed > free:
            return f"it takes {needed / 2**30:.0f} GiB of a GPU, where {free / 2**30:.0f} are free (one of --sides?)"
    return ""


def _measure(
    parallelism: str,
    options: argparse.Namespace,
    weathers: Sequence[Weather],
    change: Callable[[Weather], None],
    tell: Tell,
    clock: Clock,
) -> None:
    steps: dict[str, Step] = {}
    for side in options.sides:
        steps[side] = make_step(side, parallelism, options)
        steps[side](0)
    number = 1
    for weather in weathers:
        change(weather)
        times: dict[str, list[float]] = {side: [] for side in steps}
        losses: dict[str, list[float]] = {side: [] for side in steps}
        for round_number in range(options.rounds + NUM_WARMUPS):
            if clock.is_over():
                break
            for side, step in steps.items():
                seconds, loss = step(number)
                if round_number >= NUM_WARMUPS:
                    times[side].append(seconds)
                    losses[side].append(loss)
            number += 1
        if not times[options.sides[0]]:
            return
        case = f"{name_of(parallelism, options)}, {weather}"
        tell(
            Found(
                case,
                {side: _largest(values) for side, values in times.items()},
                {side: _mean(values) for side, values in losses.items()},
            )
        )


def _largest(values: Sequence[float]) -> list[float]:
    """Of all ranks, one by one."""
    found = torch.tensor(values, dtype=torch.float64)
    disttrain.all_reduce(found, disttrain.ReduceOp.MAX)
    return found.tolist()


def _mean(values: Sequence[float]) -> list[float]:
    found = torch.tensor(values, dtype=torch.float64)
    disttrain.all_reduce(found)
    return (found / disttrain.get_world_size()).tolist()


def _say(line: str) -> None:
    if disttrain.get_rank() == 0:
        print(line, flush=True)


def _let_go(device: str) -> None:
    """Of a case's models, before the next one's."""
    gc.collect()
    torch.compiler.reset()
    if device == "cuda":
        torch.cuda.empty_cache()
