"""What the ranks of a network's benchmark do: steps of both sides in turns, at each weather, told as they come.

A time is the slowest rank's, a loss the mean of all ranks'. All ranks end together once `--seconds` are over: what is
measured by then has been told.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from harness import OURS, TORCH, Row, brief, row
from networks.sides import PARALLELISMS, Step, in_pairs, make_step, num_parameters, sides_of, sizes_of

import disttrain

BYTES_PER_PARAMETER = {"adamw": 20, "sgd": 12}
"""Of parameters, gradients and averages in 4 bytes each, and of what is gathered and packed."""


@dataclass(frozen=True)
class Weather:
    """A packet's delay one way, None where that is as it is; and what a host may send, 0: as much as it can."""

    delay_ms: float | None = None
    mbit_s: float = 0.0

    def __str__(self) -> str:
        delay = "" if self.delay_ms is None else f"{self.delay_ms:g} ms"
        return delay + (f", {self.mbit_s:g} Mbit/s" if self.mbit_s else "")


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
    parser.add_argument("--form", help="in which ours gathers and reduces a group, by fully_shard's TransferPolicy")
    parser.add_argument("--forms", nargs="+", default=[], help="also ours in each of these: flat, in_place, mixed")
    parser.add_argument("--together", type=int, help="how many blocks ours gathers as one, by the same")
    parser.add_argument("--optimizer", choices=BYTES_PER_PARAMETER, default="adamw")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmups", type=int, default=2, help="rounds before them")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no round after so many")
    parser.set_defaults(**defaults)


def run(
    options: argparse.Namespace, weathers: Sequence[Weather], change: Callable[[Weather], None], tell: Tell
) -> None:
    """All cases of these ranks; `change` makes the weather. Collective."""
    clock = Clock(options.seconds)
    for parallelism, dim, layers in itertools.product(options.parallelisms, options.dims, options.layers):
        chosen = argparse.Namespace(**{**vars(options), "dim": dim, "layers": layers})
        turns, reason = _turns(parallelism, chosen)
        if clock.is_over():
            reason = f"since {options.seconds:.0f} s are over"
        if reason:
            _say(f"{name_of(parallelism, chosen)}: left out, {reason}")
            continue
        _measure(parallelism, chosen, turns, weathers, change, tell, clock)


def name_of(parallelism: str, options: argparse.Namespace) -> str:
    hosts = " (one rank a host)" if in_pairs(parallelism) and options.ranks_per_host == 1 else ""
    return f"{parallelism}{hosts}, {disttrain.get_world_size()} ranks, dim {options.dim} x {options.layers}"


def _turns(parallelism: str, options: argparse.Namespace) -> tuple[list[list[str]], str]:
    """Sides that are measured in turns, and those after them, where not all fit at once; or why it cannot run. Alike on
    all ranks."""
    num_ranks, sizes = disttrain.get_world_size(), sizes_of(options)
    together = [sides_of(parallelism, options)]
    one_by_one = [[side] for side in together[0]]
    if in_pairs(parallelism) and (num_ranks < 4 or num_ranks % 2):
        return [], "it takes two pairs of ranks"
    if parallelism == "tp" and any(size % num_ranks for size in (sizes.kv_heads, sizes.seq, sizes.ffn)):
        return [], f"{sizes.kv_heads} heads, {sizes.seq} tokens or {sizes.ffn} columns do not divide by {num_ranks}"
    if parallelism == "pp" and sizes.layers < num_ranks:
        return [], "a stage would have no layer"
    if options.device != "cuda":
        return together, ""
    free = -_largest([-float(torch.cuda.mem_get_info()[0])])[0]
    # Each GPU has an equal part of all ranks.
    num_copies = num_ranks // 2 if parallelism == "hsdp" else 1
    per_gpu = num_parameters(sizes) * num_copies / min(torch.cuda.device_count(), num_ranks)
    needed = per_gpu * BYTES_PER_PARAMETER[options.optimizer]
    if needed * len(one_by_one) < free:
        return together, ""
    gib = f"{needed / 2**30:.0f} GiB of a GPU for each side, where {free / 2**30:.0f} are free"
    if needed < free:
        _say(f"{name_of(parallelism, options)}: one side after the other, since it takes {gib}")
        return one_by_one, ""
    return [], f"it takes {gib}"


def _measure(
    parallelism: str,
    options: argparse.Namespace,
    turns: Sequence[Sequence[str]],
    weathers: Sequence[Weather],
    change: Callable[[Weather], None],
    tell: Tell,
    clock: Clock,
) -> None:
    found = [
        Found(f"{name_of(parallelism, options)}, {weather}".removesuffix(", 0 ms"), {}, {}) for weather in weathers
    ]
    for sides in turns:
        change(weathers[0])
        steps: dict[str, Step] = {}
        for side in sides:
            steps[side] = make_step(side, parallelism, options)
            steps[side](0)
        for weather, here in zip(weathers, found, strict=True):
            change(weather)
            if not _rounds(steps, here, options, clock):
                return
            if sides is turns[-1]:
                tell(here)
        steps.clear()
        let_go(options)


def _rounds(steps: dict[str, Step], found: Found, options: argparse.Namespace, clock: Clock) -> bool:
    """As many as there is time for; whether there was any."""
    times: dict[str, list[float]] = {side: [] for side in steps}
    losses: dict[str, list[float]] = {side: [] for side in steps}
    for round_number in range(options.warmups + options.rounds):
        if clock.is_over():
            break
        for side, step in steps.items():
            seconds, loss = step(round_number)
            if round_number >= options.warmups:
                times[side].append(seconds)
                losses[side].append(loss)
    if not all(times.values()):
        return False
    for side in steps:
        found.times_s[side], found.losses[side] = _largest(times[side]), _mean(losses[side])
    return True


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


def let_go(options: argparse.Namespace) -> None:
    """Of a case's models, before the next one's."""
    gc.collect()
    if options.compile:
        torch.compiler.reset()
    if options.device == "cuda":
        torch.cuda.empty_cache()
