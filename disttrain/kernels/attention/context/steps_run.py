"""Runs the steps of a rank: attention in a ring, or of gathered keys, and its backward.

Keys and values of others are not kept: backward has them sent again, and sends the terms of their gradients back to
their owners, who add them in fp32 or wider, in the order of the steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from disttrain.kernels.attention.context.exchange import Pair, Sizes, UnderWay, start
from disttrain.kernels.attention.context.join import Joined
from disttrain.kernels.attention.context.kernels import Task
from disttrain.kernels.attention.context.parts import Parts
from disttrain.kernels.attention.context.peers import KEYS, TERMS, slots_for
from disttrain.kernels.attention.context.steps import GATHER, Ranges, Step
from disttrain.kernels.attention.rules import Rule
from disttrain.kernels.choice import wide_dtype
from disttrain.process_group import ProcessGroup


class Program(NamedTuple):
    """What one rank does."""

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
        run = _Run(program, query, key, value)
        out, lse = run.forward()
        ctx.program = program
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        # Whoever calls backward may be within autocast.
        with torch.autocast(grad_out.device.type, enabled=False):
            run = _Run(ctx.program, query, key, value)
            grads = run.backward(grad_out, out, lse, has_terms=any(ctx.needs_input_grad[1:3]))
        wanted = zip(grads, ctx.needs_input_grad, strict=False)
        return (*(grad if is_wanted else None for grad, is_wanted in wanted), None)


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
        return joined.out.to(self._query.dtype), joined.lse

    def backward(
        self, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *, has_terms: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = wide_dtype(self._query.dtype)
        dquery, *own_terms = (torch.zeros_like(tensor, dtype=wide) for tensor in (self._query, *self._pair))
        totals = own_terms[0], own_terms[1]
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
                terms = self._task(step).backward(dquery, grad_out, self._query, *keys, out, lse)
            if not has_terms:
                continue
            if terms is not None:
                _add(totals, terms, self._slices(step.own), _slices_within(step.own, step.keys))
            if back is not None:
                self._add_terms(totals, steps[number - 1], back.wait())
            back = self._start_back(number, terms)
        if back is not None:
            self._add_terms(totals, steps[-1], back.wait())
        key, value = self._pair
        return dquery.to(self._query.dtype), totals[0].to(key.dtype), totals[1].to(value.dtype)

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
        if not step.receives and step.own == self._program.parts.ranges[self._rank]:
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

    def _add_terms(self, totals: Pair, step: Step, messages: Mapping[int, torch.Tensor]) -> None:
        """Adds what others have sent back, in the order of their ranks."""
        for source, ranges in step.sends:
            terms = self._sizes.pair(messages[source])
            _add(totals, terms, self._slices(ranges), _slices_within(ranges, ranges))


def _add(totals: Pair, terms: Pair, targets: Sequence[slice], sources: Sequence[slice]) -> None:
    for total, term in zip(totals, terms, strict=True):
        for target, source in zip(targets, sources, strict=True):
            total[:, :, target].add_(term[:, :, source])


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
