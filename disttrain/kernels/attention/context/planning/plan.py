"""Chooses how keys come to queries that are on other ranks, by what each way sends, hides and holds. Pure.

    print(ContextPlan(mirrored(131072, 8), Causal(), Shape(1, 64, 8, 128, 128, 2)))

The cost of a way is the time that the slowest rank takes beyond its share of the computing: what is sent while nothing
is computed; what computing takes beyond an equal share; a fixed time for each exchange; and the sums in fp32 to which
the results of each piece are joined. A rank's exchange in a ring is hidden under the computing of the step before, as
far as that reaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Final, NamedTuple

from disttrain.console import table
from disttrain.kernels.attention.context.parts import Parts
from disttrain.kernels.attention.context.planning.heads_cut import heads_divide, kv_heads_of
from disttrain.kernels.attention.context.planning.steps import GATHER, HEADS, RING, WAYS, Ranges, Step, steps_of
from disttrain.kernels.attention.context.planning.tiles import Tiles, tiles_of
from disttrain.kernels.attention.rules import Rule, name_of


class Shape(NamedTuple):
    """Sizes of attention, alike on all ranks."""

    batch_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int
    """Bytes of an element."""


class Machine(NamedTuple):
    """The rates of an H200, forward and backward, fitted to `benchmarks/results/context_gpu_4.json`."""

    bytes_per_s: float
    """Sent by a rank to all others."""
    flops_per_s: float = 575e12
    """Of attention in 16 bits."""
    latency_s: float = 0.28e-3
    """For an exchange, of which the host launches several kernels."""
    ahead_s: float = 13e-3
    """Of computing: in longer calls the host is ahead, and latencies count in proportion less."""
    join_s: float = 0.0195e-9
    """For an element of results that is joined to others, with those of its gradient."""


ONE_HOST: Final = Machine(bytes_per_s=160e9)
HOSTS: Final = Machine(bytes_per_s=50e9)
"""By a network of 400 Gbit/s for each GPU."""


class WayCost(NamedTuple):
    """The costs of one way, forward and backward. Bytes are those of the rank that has most."""

    way: str
    forward_bytes: int
    """Sent by a rank."""
    backward_bytes: int
    exposed_bytes: float
    """Of both, while nothing is computed."""
    num_exchanges: int
    memory_bytes: int
    """Of keys, values and heads that come from others, at once."""
    exposed_s: float
    waiting_s: float
    """In which a rank computes more than an equal share."""
    latency_s: float
    """Of all exchanges."""
    joining_s: float

    @property
    def cost_s(self) -> float:
        return self.exposed_s + self.waiting_s + self.latency_s + self.joining_s


BACKWARD_FLOPS: Final = 2.5
"""Of those of forward: five products in place of two."""
_AS_FAST: Final = 0.005
"""Of a call's whole time: what differs by less is as fast."""
_COPIES_OF_HEADS: Final = 2
"""To put heads and positions in order takes as long as so many joins of all results."""


class ContextPlan:
    """Who sends what to whom, and what is computed when, of one attention with its positions cut into `parts`.

    Args: rule  of the whole sequence, with the tensors of its masks on the CPU.
    """

    def __init__(self, parts: Parts, rule: Rule | None, shape: Shape, machine: Machine = ONE_HOST) -> None:
        self.parts = parts
        self.rule = rule
        self.shape = shape
        self.machine = machine
        self.tiles: Tiles = tiles_of(parts, rule)

    def steps(self, rank: int, way: str) -> tuple[Step, ...]:
        """The steps of a rank, of the ways "ring" and "gather"."""
        return steps_of(self.tiles, rank, way)

    def sent_bytes(self, rank: int, way: str, *, has_terms: bool = True) -> tuple[int, int]:
        """Bytes that a rank sends forward and backward. `has_terms`: keys or values want gradients."""
        if way == HEADS:
            return self._bytes_of_heads(rank)
        steps = self.steps(rank, way)
        forward = sum(self._bytes_of(step.sends) for step in steps)
        terms = sum(self._bytes_of(step.receives) for step in steps) if has_terms else 0
        return forward, forward + terms

    @property
    def ways(self) -> tuple[str, ...]:
        """Those that can be taken."""
        divides = heads_divide(self.shape.num_heads, self.shape.num_kv_heads, self.parts.num_ranks)
        return WAYS if divides else (RING, GATHER)

    @cached_property
    def costs(self) -> tuple[WayCost, ...]:
        """Of each way that can be taken, the one that is chosen first, then by their costs: of those that are as fast,
        the one that takes least memory."""
        costs = sorted((self._cost(way) for way in self.ways), key=lambda each: each.cost_s)
        bound_s = costs[0].cost_s + _AS_FAST * (self._mean_s + costs[0].cost_s)
        best = min((each for each in costs if each.cost_s <= bound_s), key=lambda each: each.memory_bytes)
        return (best, *(each for each in costs if each is not best))

    @property
    def way(self) -> str:
        """The way that is chosen."""
        return self.costs[0].way

    @property
    def reason(self) -> str:
        """Why that is chosen, a whole sentence."""
        best, *others = self.costs
        takes = [
            f"{_time(best.exposed_s)} for {_size(best.exposed_bytes)} that nothing hides",
            f"{_time(best.latency_s)} for {best.num_exchanges} exchanges",
            f"{_time(best.joining_s)} to join results"
            if best.way != HEADS
            else f"{_time(best.joining_s)} to order them",
            *([f"{_time(best.waiting_s)} for unequal work"] if best.waiting_s else []),
        ]
        more = [
            f"{each.way} {_time(abs(difference))} {'more' if difference >= 0 else 'less, and more memory'}"
            for each in others
            for difference in (each.cost_s - best.cost_s,)
        ]
        return f"{best.way} takes {', '.join(takes)}; {', '.join(more)}."

    def __str__(self) -> str:
        shape, num_ranks = self.shape, self.parts.num_ranks
        heads = f"{shape.num_heads}/{shape.num_kv_heads} heads of {shape.head_dim}"
        call = f"{name_of(self.rule)}: {shape.batch_size} x {heads}, {self.parts.length:,} positions"
        lines = [
            f"{call} on {num_ranks} ranks, imbalance {100 * self.tiles.imbalance:.1f} %",
            *str(self.parts).splitlines()[1:],
            "",
        ]
        columns = ("way", "sent forward", "backward", "memory", "exposed", "waiting", "latency", "joining", "cost")
        rows = [
            (
                each.way,
                *map(_size, (each.forward_bytes, each.backward_bytes, each.memory_bytes)),
                *map(_time, (each.exposed_s, each.waiting_s, each.latency_s, each.joining_s, each.cost_s)),
            )
            for each in self.costs
        ]
        lines += [table(columns, rows, words=(0,)), "", f"{self.way} is chosen: {self.reason}"]
        if self.way == RING:
            lines += ["", self._table_of_ring()]
        return "\n".join(lines)

    def _table_of_ring(self) -> str:
        """By rank and step, whose keys are computed with, and which share of an equal step's pairs of places."""
        num_ranks = self.parts.num_ranks
        ranks = range(num_ranks)
        mean = sum(sum(self._pairs(rank)) for rank in ranks) / num_ranks**2 or 1
        rows = []
        for rank in ranks:
            pairs = self._pairs(rank)
            cells = [
                f"keys of {(rank - number) % num_ranks} ({100 * done / mean:.0f} %)" if done else "-"
                for number, done in enumerate(pairs)
            ]
            rows.append((f"rank {rank}", *cells))
        words = tuple(range(num_ranks + 1))
        return table(("", *(f"step {number}" for number in ranks)), rows, words=words)

    def _cost(self, way: str) -> WayCost:
        ranks = range(self.parts.num_ranks)
        sent = [self.sent_bytes(rank, way) for rank in ranks]
        forward, backward = (max(each) for each in zip(*sent, strict=True))
        if way == RING:
            exposed = max(self._exposed_in_ring(rank) for rank in ranks)
            num_exchanges = 3 * (len(ranks) - 1)
        else:
            exposed = float(max(there + back for there, back in sent))
            num_exchanges = 4 if way == HEADS else 3
        machine, mean_s = self.machine, self._mean_s
        most_s = max(self._computing_s(sum(self._pairs(rank)), 1 + BACKWARD_FLOPS) for rank in ranks)
        return WayCost(
            way,
            forward,
            backward,
            exposed,
            num_exchanges,
            memory_bytes=max(self._memory_bytes(rank, way) for rank in ranks),
            exposed_s=exposed / machine.bytes_per_s,
            waiting_s=0.0 if way == HEADS else most_s - mean_s,
            latency_s=num_exchanges * machine.latency_s * min(1.0, machine.ahead_s / mean_s if mean_s else 1.0),
            joining_s=max(self._num_joined(rank, way) for rank in ranks) * machine.join_s,
        )

    @cached_property
    def _mean_s(self) -> float:
        """The time of a rank's share of the computing."""
        ranks = range(self.parts.num_ranks)
        return self._computing_s(sum(sum(self._pairs(rank)) for rank in ranks) / len(ranks), 1 + BACKWARD_FLOPS)

    def _num_joined(self, rank: int, way: str) -> int:
        """The elements of results that are joined to those of another piece."""
        num_positions = self.parts.size(rank)
        if way == HEADS:
            num_positions *= _COPIES_OF_HEADS
        else:
            pieces = (piece for step in self.steps(rank, way) for piece in step.pieces)
            num_positions = max(0, sum(len(piece.queries) for piece in pieces) - num_positions)
        return self.shape.batch_size * self.shape.num_heads * self.shape.value_dim * num_positions

    def _exposed_in_ring(self, rank: int) -> float:
        """The bytes of each exchange, as far as the step before takes less time."""
        steps, pairs = self.steps(rank, RING), self._pairs(rank)
        exposed = 0.0
        for number in range(1, len(steps)):
            before = pairs[number - 1]
            incoming = self._bytes_of(steps[number].receives)
            exposed += max(0.0, max(incoming, self._bytes_of(steps[number].sends)) - self._bytes_meanwhile(before, 1))
            # Terms of the step before go with the keys of this one.
            back = self._bytes_of(steps[number - 1].receives)
            exposed += max(0.0, incoming + back - self._bytes_meanwhile(before, BACKWARD_FLOPS))
        # Nothing is left to be computed under the last ones.
        return exposed + self._bytes_of(steps[-1].receives)

    def _pairs(self, rank: int) -> tuple[float, ...]:
        """The number of pairs of a query and a key in each step of a ring; those of pieces seen in part count half."""
        return tuple(
            sum(
                len(piece.queries) * len(piece.keys) * (1.0 if piece.band == (-1, -1) else 0.5) for piece in step.pieces
            )
            for step in self.steps(rank, RING)
        )

    def _bytes_meanwhile(self, num_pairs: float, times: float) -> float:
        """The bytes that are sent while so many pairs are computed so many times."""
        return self._computing_s(num_pairs, times) * self.machine.bytes_per_s

    def _computing_s(self, num_pairs: float, times: float) -> float:
        shape = self.shape
        flops = 2 * shape.batch_size * shape.num_heads * (shape.head_dim + shape.value_dim) * num_pairs
        return times * flops / self.machine.flops_per_s

    def _memory_bytes(self, rank: int, way: str) -> int:
        shape = self.shape
        if way == HEADS:
            heads = shape.num_heads // self.parts.num_ranks
            kv = kv_heads_of(rank, shape.num_kv_heads, self.parts.num_ranks)
            widths = (heads + len(kv)) * (shape.head_dim + shape.value_dim)
            return shape.batch_size * self.parts.length * widths * shape.itemsize
        sizes = [self._bytes_of(step.receives) for step in self.steps(rank, way)]
        # In a ring those of one step are computed with while those of the next come.
        return max((sum(pair) for pair in zip(sizes, [*sizes[1:], 0], strict=True)), default=0)

    def _bytes_of(self, messages: Sequence[tuple[int, Ranges]]) -> int:
        """Of keys and values."""
        shape = self.shape
        num_positions: int = sum(len(run) for _, ranges in messages for run in ranges)
        width = shape.num_kv_heads * (shape.head_dim + shape.value_dim)
        return shape.batch_size * num_positions * width * shape.itemsize

    def _bytes_of_heads(self, rank: int) -> tuple[int, int]:
        """Queries, keys and values of this rank's positions there, results of others' back; and likewise backward."""
        shape, parts = self.shape, self.parts
        each = shape.num_heads // parts.num_ranks
        others = [other for other in range(parts.num_ranks) if other != rank]
        theirs = parts.length - parts.size(rank)

        def inputs(other: int, size: int) -> int:
            kv = kv_heads_of(other, shape.num_kv_heads, parts.num_ranks)
            return size * (each * shape.head_dim + len(kv) * (shape.head_dim + shape.value_dim))

        there = sum(inputs(other, parts.size(rank)) for other in others) + theirs * each * shape.value_dim
        back = inputs(rank, theirs) + len(others) * parts.size(rank) * each * shape.value_dim
        element = shape.batch_size * shape.itemsize
        return element * there, element * back


def _size(num_bytes: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(num_bytes) >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
