"""What the ranks of a network's benchmark do: steps of both sides in turns, case by case, told as they come.

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
from networks.sides import FORMS, PARALLELISMS, Step, in_pairs, make_step, num_parameters, sides_of, sizes_of

import disttrain

BYTES_PER_PARAMETER = {"adamw": 17, "sgd": 9}
"""Of parameters, gradients and averages in 4 bytes each, and a little."""
BYTES_PER_GATHERED, BYTES_PER_RANK = 14, 3 << 29
"""Of a block's parameters on each rank: two blocks gathered, the gradients of one, and these packed; and whatever."""


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
        pairs = zip(self.losses.get(OURS, []), self.losses.get(TORCH, []), strict=False)
        return max((abs(one - other) / abs(other) for one, other in pairs), default=0.0)

    @property
    def is_one_loss(self) -> bool:
        """Whether the losses of ours are equal bit for bit in all forms, as far as all have come."""
        ours = [losses for side, losses in self.losses.items() if side != TORCH]
        return all(len(set(step)) == 1 for step in zip(*ours, strict=False))

    def line(self) -> str:
        sides = "  ".join(
            f"{side} {brief(1e3 * statistics.median(times)):>6} ms [{brief(1e3 * min(times))},"
            f" {brief(1e3 * max(times))}]"
            for side, times in self.times_s.items()
        )
        ratio = "" if self.row.ratio is None else f"  torch / ours {1 / self.row.ratio:.3f}"
        last = next(iter(self.losses.values()))[-1]
        forms = "" if self.is_one_loss else ", DIFFERENT IN FORMS"
        return f"{self.case:44} {sides}{ratio}  loss {last:.4f}, apart by {self.loss_gap:.1e}{forms}"


Tell = Callable[[Found], None]


class Clock:
    """When the time is over, for all ranks alike."""

    def __init__(self, limit_s: float) -> None:
        self._end_s = time.monotonic() + limit_s

    def is_over(self) -> bool:
        """Collective: whether it is for any rank."""
        return _largest([float(time.monotonic() > self._end_s)])[0] > 0


def shape(text: str) -> tuple[int, int]:
    """Dim and layers, of "512x24"."""
    dim, layers = map(int, text.split("x"))
    return dim, layers


def add_options(parser: argparse.ArgumentParser, **defaults: object) -> None:
    """What the ranks need to know."""
    parser.add_argument("--parallelisms", nargs="+", choices=PARALLELISMS, default=list(PARALLELISMS))
    parser.add_argument("--sides", nargs="+", choices=(TORCH, OURS), default=[TORCH, OURS])
    parser.add_argument("--shapes", type=shape, nargs="+", default=[(128, 12)], metavar="DIMxLAYERS")
    for name, value in {"heads": 0, "kv-heads": 0, "ffn": 0, "vocab": 512, "seq": 64, "batch": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value, help="" if value else "0: as the dim asks for")
    parser.add_argument("--microbatches", type=int, default=4, help="of a pipeline's step")
    parser.add_argument("--dtype", default="float32", help="what is computed in; sharded parameters are kept in fp32")
    parser.add_argument("--compile", action="store_true", help="the blocks, on both sides")
    parser.add_argument("--form", choices=FORMS, help="of ours, by fully_shard's TransferPolicy; else its own choice")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=[], help="also ours in each of these")
    parser.add_argument("--together", type=int, help="how many blocks ours gathers as one, by the same")
    parser.add_argument("--optimizer", choices=BYTES_PER_PARAMETER, default="adamw")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmups", type=int, default=2, help="rounds before them")
    parser.add_argument("--case-seconds", type=float, default=1e9, help="begin no round of a case but its first then")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no round after so many")
    parser.set_defaults(**defaults)


def run(options: argparse.Namespace, weather: Weather, tell: Tell) -> None:
    """All cases of these ranks. Collective."""
    clock = Clock(min(options.seconds, options.until - time.time()))
    for (dim, layers), parallelism in itertools.product(options.shapes, options.parallelisms):
        case = argparse.Namespace(**{**vars(options), "dim": dim, "layers": layers, "parallelism": parallelism})
        plan = plan_of(case, clock)
        case.optimizer = plan.optimizer
        name = ", ".join(filter(None, (name_of(case), str(weather))))
        if not plan.turns:
            _say(f"{name}: left out, {plan.remark}")
            continue
        if plan.remark:
            _say(f"{name}: {plan.remark}")
        _measure(name, case, plan, tell, clock)


def name_of(case: argparse.Namespace) -> str:
    hosts = " (one rank a host)" if in_pairs(case.parallelism) and case.ranks_per_host == 1 else ""
    optimizer = "" if case.optimizer == "adamw" else f", {case.optimizer}"
    return f"{case.parallelism}{hosts}, {disttrain.get_world_size()} ranks, dim {case.dim} x {case.layers}{optimizer}"


@dataclass(frozen=True)
class Plan:
    """Sides that take turns, and those after them, where not all fit at once; none where the case cannot run."""

    turns: list[list[str]]
    optimizer: str
    remark: str = ""


def plan_of(case: argparse.Namespace, clock: Clock) -> Plan:
    """Alike on all ranks. Collective."""
    sides = sides_of(case.parallelism, case)
    if reason := _unfit(case):
        return Plan([], case.optimizer, reason)
    if clock.is_over():
        return Plan([], case.optimizer, "since its time is over")
    if case.device != "cuda":
        return Plan([sides], case.optimizer)
    free = -_largest([-float(torch.cuda.mem_get_info()[0])])[0]
    needed = {name: _needed_bytes(case, name) for name in dict.fromkeys((case.optimizer, "sgd"))}
    if needed[case.optimizer] * len(sides) < free:
        return Plan([sides], case.optimizer)
    said = f"{needed[case.optimizer] / 2**30:.0f} GiB of a GPU for each side, where {free / 2**30:.0f} are free"
    if needed[case.optimizer] < free:
        return Plan([[side] for side in sides], case.optimizer, f"one side after the other, since it takes {said}")
    if needed["sgd"] < free and case.parallelism != "pp":
        return Plan([[side] for side in sides], "sgd", f"SGD, one side after the other, since AdamW takes {said}")
    return Plan([], case.optimizer, f"it takes {said}")


def _unfit(case: argparse.Namespace) -> str:
    """Why the ranks cannot run it, if so."""
    num_ranks, sizes = disttrain.get_world_size(), sizes_of(case)
    if in_pairs(case.parallelism) and (num_ranks < 4 or num_ranks % 2):
        return "it takes two pairs of ranks"
    if case.parallelism == "tp" and any(size % num_ranks for size in (sizes.kv_heads, sizes.seq, sizes.ffn)):
        return f"{sizes.kv_heads} heads, {sizes.seq} tokens or {sizes.ffn} columns do not divide by {num_ranks}"
    if case.parallelism == "pp" and sizes.layers < num_ranks:
        return "a stage would have no layer"
    return ""


def _needed_bytes(case: argparse.Namespace, optimizer: str) -> float:
    """Of one GPU, which has an equal part of all ranks, by one side."""
    num_ranks, sizes = disttrain.get_world_size(), sizes_of(case)
    num_gpus = min(torch.cuda.device_count(), num_ranks)
    num_copies = num_ranks // 2 if case.parallelism == "hsdp" else 1
    resting = num_parameters(sizes) * num_copies * BYTES_PER_PARAMETER[optimizer]
    gathered = num_parameters(sizes) / sizes.layers * BYTES_PER_GATHERED
    return (resting + num_ranks * (gathered + BYTES_PER_RANK)) / num_gpus


def _measure(name: str, case: argparse.Namespace, plan: Plan, tell: Tell, clock: Clock) -> None:
    found = Found(name, {}, {})
    for sides in plan.turns:
        steps: dict[str, Step] = {}
        for side in sides:
            steps[side] = make_step(side, case.parallelism, case)
            steps[side](0)
        is_measured = _rounds(steps, found, case, clock, case.case_seconds / len(plan.turns))
        steps.clear()
        let_go(case)
        if not is_measured:
            return
    tell(found)


def _rounds(steps: dict[str, Step], found: Found, case: argparse.Namespace, clock: Clock, limit_s: float) -> bool:
    """As many as there is time for; whether there was any."""
    times: dict[str, list[float]] = {side: [] for side in steps}
    losses: dict[str, list[float]] = {side: [] for side in steps}
    warming, own = Clock(limit_s / 3), Clock(limit_s)
    num_rounds = 0
    for _ in range(case.warmups):
        if warming.is_over() or clock.is_over():
            break
        for step in steps.values():
            step(num_rounds)
        num_rounds += 1
    for number in range(case.rounds):
        if clock.is_over() or (number and own.is_over()):
            break
        for side, step in steps.items():
            seconds, loss = step(num_rounds + number)
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


def let_go(case: argparse.Namespace) -> None:
    """Of models, before the next ones; all ranks have when it returns."""
    gc.collect()
    if case.compile:
        torch.compiler.reset()
    if case.device == "cuda":
        torch.cuda.empty_cache()
    disttrain.barrier()
