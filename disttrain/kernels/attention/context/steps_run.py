"""Runs the steps of a rank: attention in a ring, or of gathered keys, and its backward.

Keys and values of others are not kept: backward has them sent again, and sends the terms of their gradients back to
their owners, who add them in fp32 or wider, in the order of the steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from disttrain.kernels.attention.context.agreement import between_exchanges
from disttrain.kernels.attention.context.blocks.kernels import Task
from disttrain.kernels.attention.context.exchange import Pair, Sizes, UnderWay, start
from disttrain.kernels.attention.context.parts import Parts
from disttrain.kernels.attention.context.peers import KEYS, TERMS, slots_for
from disttrain.kernels.attention.context.planning.steps import GATHER, Ranges, Step
from disttrain.kernels.attention.context.sums.joined import Joined, empty_by_positions
from disttrain.kernels.attention.context.sums.sums import Sums
from disttrain.kernels.attention.rules import Rule
from disttrain.process_group import ProcessGroup


class Program(NamedTuple):
    """The work of one rank."""

    group: ProcessGroup
    parts: Parts
    steps: tuple[Step, ...]
    way: str
    rule: Rule | None
    """With its tensors on the device."""
    scale: float
    by: str | None
    most_sent: tuple[int, ...]
    """Of each step of a ring, the most positions that a rank sends, as all ranks know."""
    num_head_groups: int = 1
    """The number of groups of heads that run one behind the other, as all ranks know."""


def run_steps(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, program: Program) -> torch.Tensor:
    """Attention of this rank's queries (B, H, L_r, E) over all ranks' keys, as `program` says. Collective."""
    apply: Any = _Attention.apply
    result: torch.Tensor = apply(query, key, value, program)
    return result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, program: Program
    ) -> torch.Tensor:
        with between_exchanges(program.group):
            results = (run.forward() for run in _runs(program, query, key, value))
            out, lse = _joined(results, program.num_head_groups)
        ctx.program = program
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        count = ctx.program.num_head_groups
        has_terms = any(ctx.needs_input_grad[1:3])
        # Whoever calls backward may be within autocast.
        with torch.autocast(grad_out.device.type, enabled=False), between_exchanges(ctx.program.group):
            runs = _runs(ctx.program, query, key, value)
            results = zip(*(tensor.chunk(count, 1) for tensor in (grad_out, out, lse)), strict=True)
            each = (run.backward(*result, has_terms=has_terms) for run, result in zip(runs, results, strict=True))
            grads = _joined(each, count)
        wanted = zip(grads, ctx.needs_input_grad, strict=False)
        return (*(grad if is_wanted else None for grad, is_wanted in wanted), None)


def _runs(program: Program, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Iterator[_Run]:
    """One for each group of heads, each made when the one before has ended."""
    count = program.num_head_groups
    if count == 1:
        yield _Run(program, query, key, value)
        return
    num_heads, rule = query.shape[1] // count, program.rule
    for number, tensors in enumerate(zip(*(tensor.chunk(count, 1) for tensor in (query, key, value)), strict=True)):
        heads = slice(number * num_heads, (number + 1) * num_heads)
        of_heads = None if rule is None else rule.local(slice(0, query.shape[0]), heads)
        yield _Run(program._replace(rule=of_heads), *tensors)


def _joined(groups: Iterable[tuple[torch.Tensor, ...]], count: int) -> tuple[torch.Tensor, ...]:
    """The results of groups of heads as those of all heads, without keeping them twice."""
    results: list[torch.Tensor] = []
    for number, group in enumerate(groups):
        if count == 1:
            return group
        if not results:
            results = [_empty_for(part, count) for part in group]
        for result, part in zip(results, group, strict=True):
            result.narrow(1, number * part.shape[1], part.shape[1]).copy_(part)
    return tuple(results)


def _empty_for(part: torch.Tensor, count: int) -> torch.Tensor:
    """Memory for so many groups of heads."""
    shape = (part.shape[0], count * part.shape[1], *part.shape[2:])
    return part.new_empty(shape) if part.dim() == 3 else empty_by_positions(part, shape, part.dtype)


class _Run:
    """One forward or backward."""

    def __init__(self, program: Program, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        self._program = program
        self._query = query
        self._pair = key, value
        self._rank = program.group.group_rank
        self._sizes = Sizes(key.shape[0], key.shape[1], key.shape[3], value.shape[3])
        most = self._sizes.num_elements([range(max(program.most_sent, default=0))]) * key.element_size()
        self._slots = slots_for(program.group, key.device, most)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        joined = Joined(self._query, self._sizes.value_dim)
        steps = self._program.steps
        coming = self._start(0)
        for number, step in enumerate(steps):
            messages = coming.wait()
            if number + 1 < len(steps):
                coming = self._start(number + 1)
            if step.pieces:
                self._task(step).forward(joined, self._query, *self._keys_of(step, messages))
        out, lse = joined.result()
        return out.to(self._query.dtype), lse

    def backward(
        self, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *, has_terms: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        key, value = self._pair
        dquery, totals = Sums(self._query), (Sums(key), Sums(value))
        steps = self._program.steps
        coming = self._start(0)
        back: UnderWay | None = None
        for number, step in enumerate(steps):
            messages = coming.wait()
            if number + 1 < len(steps):
                coming = self._start(number + 1)
            terms: Pair | None = None
            if step.pieces:
                keys = self._keys_of(step, messages)
                sums = totals if self._is_of_own(step) else (Sums(keys[0]), Sums(keys[1]))
                self._task(step).backward((dquery, *sums), grad_out, self._query, *keys, out, lse)
                terms = (sums[0].total(), sums[1].total()) if sums is not totals else None
            if not has_terms:
                continue
            if terms is not None:
                _add(totals, terms, self._slices(step.own), _slices_within(step.own, step.keys))
            if back is not None:
                self._add_terms(totals, steps[number - 1], back.wait())
            back = self._start_back(number, terms)
        if back is not None:
            self._add_terms(totals, steps[-1], back.wait())
        sums_of_all = (dquery, *totals)
        dtypes = self._query.dtype, key.dtype, value.dtype
        first, second, third = (total.total().to(dtype) for total, dtype in zip(sums_of_all, dtypes, strict=True))
        return first, second, third

    def _is_of_own(self, step: Step) -> bool:
        """True if the keys of a step are all that this rank has, as they lie there."""
        return not step.receives and step.own == self._program.parts.ranges[self._rank]

    def _task(self, step: Step) -> Task:
        program = self._program
        queries = program.parts.ranges[self._rank]
        return Task(program.rule, queries, step.keys, step.pieces, program.scale, self._query.device, program.by)

    def _start(self, number: int) -> UnderWay:
        """Begins to exchange keys and values of a step."""
        step = self._program.steps[number]
        sends = dict(step.sends)

        def fill(target: int, message: torch.Tensor) -> None:
            self._sizes.fill(message, self._pair, self._slices(sends[target]))

        return self._exchange(number, KEYS, step.sends, step.receives, fill)

    def _start_back(self, number: int, terms: Pair | None) -> UnderWay:
        """Begins to send terms of a step back to the owners of keys."""
        step = self._program.steps[number]
        receives = dict(step.receives)

        def fill(target: int, message: torch.Tensor) -> None:
            if terms is not None:
                self._sizes.fill(message, terms, _slices_within(receives[target], step.keys))

        return self._exchange(number, TERMS, step.receives, step.sends, fill)

    def _exchange(
        self,
        number: int,
        kind: int,
        outgoing: Sequence[tuple[int, Ranges]],
        incoming: Sequence[tuple[int, Ranges]],
        fill: Any,
    ) -> UnderWay:
        sent, received = (
            [(rank, self._sizes.num_elements(ranges)) for rank, ranges in pairs] for pairs in (outgoing, incoming)
        )
        program = self._program
        is_together = program.way == GATHER
        slots = self._slots if program.most_sent and program.most_sent[number] else None
        return start(
            program.group, sent, received, fill, self._pair[0], is_together=is_together, slots=slots, kind=kind
        )

    def _keys_of(self, step: Step, messages: Mapping[int, torch.Tensor]) -> Pair:
        """The keys and values of a step, in the order of their positions."""
        if self._is_of_own(step):
            return self._pair
        if not step.own and len(step.receives) == 1:
            return self._sizes.pair(messages[step.receives[0][0]])
        parts: list[tuple[range, Pair]] = []
        for run, taken in zip(step.own, self._slices(step.own), strict=True):
            parts.append((run, (self._pair[0][:, :, taken], self._pair[1][:, :, taken])))
        for source, ranges in step.receives:
            key, value = self._sizes.pair(messages[source])
            for run, taken in zip(ranges, _slices_within(ranges, ranges), strict=True):
                parts.append((run, (key[:, :, taken], value[:, :, taken])))
        parts.sort(key=lambda part: part[0].start)
        if len(parts) == 1:
            return parts[0][1]
        return torch.cat([pair[0] for _, pair in parts], 2), torch.cat([pair[1] for _, pair in parts], 2)

    def _slices(self, ranges: Ranges) -> list[slice]:
        """Where this rank has positions of its own."""
        return _slices_within(ranges, self._program.parts.ranges[self._rank])

    def _add_terms(self, totals: tuple[Sums, Sums], step: Step, messages: Mapping[int, torch.Tensor]) -> None:
        """Adds what others have sent back, in the order of their ranks."""
        for source, ranges in step.sends:
            terms = self._sizes.pair(messages[source])
            _add(totals, terms, self._slices(ranges), _slices_within(ranges, ranges))


def _add(totals: tuple[Sums, Sums], terms: Pair, targets: Sequence[slice], sources: Sequence[slice]) -> None:
    for total, term in zip(totals, terms, strict=True):
        for target, source in zip(targets, sources, strict=True):
            total.add(range(target.start, target.stop), term[:, :, source])


def _slices_within(ranges: Ranges, whole: Ranges) -> list[slice]:
    """Where positions are among those of `whole`, of which each run lies within one or within several that meet."""
    slices = []
    for run in ranges:
        first = 0
        for each in whole:
            if each.start <= run.start < each.stop:
                break
            first += len(each)
        first += run.start - each.start
        slices.append(slice(first, first + len(run)))
    return slices
