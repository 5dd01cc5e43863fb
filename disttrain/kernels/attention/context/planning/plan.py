"""Chooses how keys come to queries that are on other ranks, by what each way sends, hides and holds. Pure.

    print(ContextPlan(mirrored(131072, 8), Causal(), Shape(1, 64, 8, 128, 128, 2)))

The cost of a way is in bytes of the slowest rank: those that are sent while nothing is computed; what computing takes
beyond an equal share, as the bytes that could be sent meanwhile; and for each exchange as many as its latency is worth.
A rank's exchange in a ring is hidden under the computing of the step before, as far as that reaches.
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
    """The rates that compare computing with sending: of an H100, 400 Tflop/s of attention and 50 GB/s to other
    hosts, and 20 us for an exchange."""

    flops_per_byte: float = 8000.0
    """The amount that is computed while a byte is sent."""
    latency_bytes: float = float(1 << 20)
    """The bytes that are sent in the time that an exchange takes without any."""


class WayCost(NamedTuple):
    """The costs of one way, forward and backward. Bytes are those of the rank that has most."""

    way: str
    forward_bytes: int
    """Sent by a rank."""
    backward_bytes: int
    exposed_bytes: float
    """Of both, while nothing is computed."""
    waiting_bytes: float
    """The bytes that could be sent while a rank computes more than an equal share."""
    num_exchanges: int
    memory_bytes: int
    """Of keys, values and heads that come from others, at once."""
    cost: float


BACKWARD_FLOPS: Final = 2.5
"""Of those of forward: five products in place of two."""


class ContextPlan:
    """Who sends what to whom, and what is computed when, of one attention with its positions cut into `parts`.

    Args: rule  of the whole sequence, with the tensors of its masks on the CPU.
    """

    def __init__(self, parts: Parts, rule: Rule | None, shape: Shape, machine: Machine | None = None) -> None:
        self.parts = parts
        self.rule = rule
        self.shape = shape
        self.machine = Machine() if machine is None else machine
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
        """Of each way that can be taken, the best first."""
        return tuple(sorted((self._cost(way) for way in self.ways), key=lambda each: each.cost))

    @property
    def way(self) -> str:
        """The way of least cost."""
        return self.costs[0].way

    @property
    def reason(self) -> str:
        """Why that is chosen, a whole sentence."""
        best, *others = self.costs
        exposed = f"{best.way} exposes {_size(best.exposed_bytes)} in {best.num_exchanges} exchanges"
        waiting = f" and waits as long as {_size(best.waiting_bytes)} take" if best.waiting_bytes else ""
        if not others:
            return f"{exposed}{waiting}."
        return f"{exposed}{waiting}, {others[0].way} costs {_size(others[0].cost - best.cost)} more."

    def __str__(self) -> str:
        shape, num_ranks = self.shape, self.parts.num_ranks
        heads = f"{shape.num_heads}/{shape.num_kv_heads} heads of {shape.head_dim}"
        call = f"{name_of(self.rule)}: {shape.batch_size} x {heads}, {self.parts.length:,} positions"
        lines = [
            f"{call} on {num_ranks} ranks, imbalance {100 * self.tiles.imbalance:.1f} %",
            *str(self.parts).splitlines()[1:],
            "",
        ]
        columns = ("way", "sent forward", "backward", "exposed", "waiting", "exchanges", "memory", "cost")
        rows = [
            (
                each.way,
                *map(_size, (each.forward_bytes, each.backward_bytes, each.exposed_bytes, each.waiting_bytes)),
                str(each.num_exchanges),
                _size(each.memory_bytes),
                _size(each.cost),
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
        waiting = 0.0
        if way != HEADS:
            work = [sum(self._pairs(rank)) for rank in ranks]
            waiting = self._bytes_meanwhile(max(work) - sum(work) / len(work), 1 + BACKWARD_FLOPS)
        cost = exposed + waiting + num_exchanges * self.machine.latency_bytes
        memory = max(self._memory_bytes(rank, way) for rank in ranks)
        return WayCost(way, forward, backward, exposed, waiting, num_exchanges, memory, cost)

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
        shape = self.shape
        flops = 2 * shape.batch_size * shape.num_heads * (shape.head_dim + shape.value_dim) * num_pairs
        return times * flops / self.machine.flops_per_byte

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
