"""A step of `fully_shard`, gone through by the machine that decides in a run, on sizes alone (`fsdp2/estimating`)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

from disttrain.fsdp2.estimating.rehearsal import REDUCED_ALL, REDUCTIONS, STEADY, Rehearsal
from disttrain.fsdp2.estimating.values import GroupSizes, Message, ParamSizes, Peak, SizedModule
from disttrain.fsdp2.machine.group import Buckets, Bundle, Group
from disttrain.fsdp2.machine.unit import Unit, joined
from disttrain.plan.job import Choice
from disttrain.plan.model.parts import StageParts, parameters_of_block, parameters_of_experts, parameters_outside
from disttrain.plan.sharding.transfers import ModelSharding, Transfers, transfers_of

Key = TypeVar("Key")

_FEW_BLOCKS = 4
"""That are alike, beside those of a model's first ones that have no experts."""


@dataclass(frozen=True)
class Step:
    """Memory and messages of a step on one rank.

    Args: stretches  the fullest moment of each stretch, in as many microbatches as differ from each other;  messages
          of each microbatch but the last, none where a schedule decides;  last_messages  of the last, or of all.
    """

    stretches: tuple[Peak, ...]
    messages: Counter[Message]
    last_messages: Counter[Message]

    def messages_of(self, num_microbatches: int) -> Counter[Message]:
        """All that the rank sends in a step."""
        total = Counter({message: (num_microbatches - 1) * count for message, count in self.messages.items()})
        total.update(self.last_messages)
        return total


def step_of(sharding: ModelSharding, choice: Choice, stages: tuple[StageParts, ...]) -> Step:
    """The step of a rank that holds these stages of a pipeline, or without one the whole model."""
    if choice.schedule is None:
        # The first one finds no gradients, the next one some; where only the last one reduces, that is a third kind.
        num_microbatches = min(choice.num_microbatches, 2 if choice.reduces_each else 3)
        return _step(sharding, stages[0], num_microbatches, reduces_each=choice.reduces_each)
    return _in_turn(sharding, stages)


@cache
def _in_turn(sharding: ModelSharding, stages: tuple[StageParts, ...]) -> Step:
    """A schedule's step. Each stage of the rank has a machine of its own, and the last one reduces first."""
    steps = [_step(sharding, stage, 0, reduces_each=False) for stage in reversed(stages)]
    if len(steps) == 1:
        return steps[0]
    named = [{stretch.when: Counter(stretch.by_kind) for stretch in step.stretches} for step in steps]
    orders = [
        [
            stretches[REDUCED_ALL if other < turn else REDUCTIONS if other == turn else STEADY]
            for other, stretches in enumerate(named)
        ]
        for turn in range(len(steps))
    ]
    fullest = max((_sum(order) for order in orders), key=lambda by_kind: by_kind.total())
    steady = _sum([stretches[STEADY] for stretches in named])
    messages = _sum([step.last_messages for step in steps])
    return Step((Peak(STEADY, steady), Peak(REDUCTIONS, fullest)), Counter(), messages)


def _sum(counters: Iterable[Counter[Key]]) -> Counter[Key]:
    total: Counter[Key] = Counter()
    for counter in counters:
        total.update(counter)
    return total


@cache
def _step(sharding: ModelSharding, stage: StageParts, num_microbatches: int, *, reduces_each: bool) -> Step:
    """`num_microbatches` is 0 where a schedule decides.

    Among alike blocks everything grows or shrinks in a straight line. So two models of few blocks tell all of one with
    many, where each block goes by itself.
    """
    num_few = stage.num_dense + _FEW_BLOCKS
    num_more = stage.num_blocks - num_few
    if num_more < 2 or max(transfers_of(sharding, stage).sets) > 1:
        return _rehearsed(sharding, stage, num_microbatches, reduces_each=reduces_each)
    few, more = (
        _rehearsed(sharding, replace(stage, num_blocks=num), num_microbatches, reduces_each=reduces_each)
        for num in (num_few, num_few + 1)
    )
    partners = _partners(few, num_few) if num_microbatches else range(len(few.stretches))
    return Step(
        tuple(
            _line(stretch, more.stretches[index], num_more)
            for stretch, index in zip(few.stretches, partners, strict=True)
        ),
        _counts_line(few.messages, more.messages, num_more),
        _counts_line(few.last_messages, more.last_messages, num_more),
    )


@cache
def _rehearsed(sharding: ModelSharding, stage: StageParts, num_microbatches: int, *, reduces_each: bool) -> Step:
    model = _Model(sharding, stage, has_buckets=num_microbatches > 0)
    rehearsal = Rehearsal(model.root, model.bundles, has_streams=True)
    if num_microbatches:
        rehearsal.run(num_microbatches, reduces_each=reduces_each)
    else:
        rehearsal.run_scheduled()
    first, last = rehearsal.messages[0] if num_microbatches else Counter(), rehearsal.messages[-1]
    return Step(tuple(rehearsal.stretches), first, last)


def _partners(few: Step, num_blocks: int) -> Iterator[int]:
    """Of each stretch with few blocks, which one it is with one block more: the additional block is in the middle of
    those that are alike, which are the last.

    A microbatch has the forward of the root, of each block, the loss, the backward of the root, then of each block that
    and the root's again.
    """
    num_few, num_more = 3 * num_blocks + 3, 3 * num_blocks + 6
    after = _FEW_BLOCKS // 2
    for index in range(len(few.stretches)):
        microbatch, position = divmod(index, num_few)
        shift = 0 if position <= num_blocks - after else 1 if position < num_blocks + 3 + 2 * after else 3
        yield microbatch * num_more + position + shift


def _line(few: Peak, more: Peak, num_more: int) -> Peak:
    return replace(
        few,
        by_kind=_counts_line(few.by_kind, more.by_kind, num_more),
        num_kept=few.num_kept + num_more * (more.num_kept - few.num_kept),
    )


def _counts_line(few: Mapping[Key, int], more: Mapping[Key, int], num_more: int) -> Counter[Key]:
    return Counter({key: few.get(key, 0) + num_more * (more[key] - few.get(key, 0)) for key in more})


class _Model:
    """The blocks of a stage, and what is in no block, as sizes."""

    def __init__(self, sharding: ModelSharding, stage: StageParts, *, has_buckets: bool) -> None:
        self.sharding = sharding
        self.bundles: list[Bundle] = []
        self.root = self._stage(stage, has_buckets=has_buckets)

    def _stage(self, stage: StageParts, *, has_buckets: bool) -> SizedModule:
        sharding, plan = self.sharding, transfers_of(self.sharding, stage)
        children, shapes = parameters_outside(sharding.sizes, sharding.tp, stage)
        is_tied = sharding.sizes.is_tied and stage.has_embedding and stage.has_head
        params = [self._param(shape, in_place) for shape, in_place in zip(shapes, plan.outside, strict=True)]
        root = self._module("the model", [(params, sharding.num_shards)])
        blocks = [
            self._block(name, plan, has_experts=index >= stage.num_dense)
            for index, name in enumerate(_names(stage.num_blocks))
        ]
        uses = root.body
        num_before = sum(child == 0 for child in children)
        root.body = [*uses[:num_before], *blocks, *uses[num_before:]]
        if is_tied:
            params[0].num_uses = 2
            root.body.append(uses[0])
        if has_buckets and len(plan.buckets) > 1:
            root.unit.groups[0].buckets = Buckets([[params[index] for index in bucket] for bucket in plan.buckets])
        self._bundle([root] * plan.has_outside_in_sets + blocks, plan)
        return root

    def _block(self, name: str, plan: Transfers, *, has_experts: bool) -> SizedModule:
        """With two groups where it has experts, of which other ranks have the shards."""
        sharding = self.sharding
        sizes = sharding.sizes if has_experts else sharding.sizes.without_experts
        shapes, form = parameters_of_block(sizes, sharding.tp), plan.block if has_experts else plan.dense_block
        params, num_shards = list(map(self._param, shapes, form)), sharding.num_expert_shards
        shapes = parameters_of_experts(sizes, sharding.tp, sharding.ep)
        experts = [self._param(*each, num_shards=num_shards) for each in zip(shapes, plan.experts, strict=False)]
        return self._module(name, [(params, sharding.num_shards), (experts, num_shards)])

    def _module(self, name: str, groups: list[tuple[list[ParamSizes], int]]) -> SizedModule:
        """Args: groups  their parameters, and the ranks that share these."""
        made = [(Group(self._group(params, num_shards)), params) for params, num_shards in groups if params]
        unit = Unit([group for group, _ in made], (), None)
        return SizedModule(name, unit, [(group, param) for group, params in made for param in params])

    def _bundle(self, modules: Sequence[SizedModule], plan: Transfers) -> None:
        """Bundles the groups of modules that go over the wire as one message."""
        start = 0
        for size in plan.sets:
            units = [module.unit for module in modules[start : start + size]]
            start += size
            if size > 1:
                groups = [group for unit in units for group in unit.groups]
                self.bundles.append(joined(groups, units, gathers=plan.gathers_sets))

    def _param(self, shape: tuple[int, int], is_in_place: bool, num_shards: int | None = None) -> ParamSizes:
        sharding, precision = self.sharding, self.sharding.precision
        # Where nothing is sharded, only gradients come and go.
        compute, reduce = (each * precision.is_sharded for each in (precision.compute_bytes, precision.reduce_bytes))
        num_shards = sharding.num_shards if num_shards is None else num_shards
        return ParamSizes.of(
            math.prod(shape),
            sharding.padded(shape, num_shards),
            num_shards,
            (precision.parameter_bytes, compute, reduce),
            is_in_place=is_in_place,
        )

    def _group(self, params: list[ParamSizes], num_shards: int) -> GroupSizes:
        precision, sent_bytes = self.sharding.precision, sum(param.sent_bytes for param in params)
        return GroupSizes(
            params=tuple(params),
            shard_bytes=sum(param.gradient_bytes for param in params),
            sent_bytes=sent_bytes,
            whole_bytes=sum(param.whole_bytes for param in params),
            num_shards=num_shards,
            num_replicas=self.sharding.num_replicas,
            cast_bytes=sent_bytes * (precision.compute_bytes != precision.parameter_bytes),
            is_offloaded=False,
            gathered_as=precision.compute_bytes,
            may_be_in_place=True,
            reduces_as=None,
        )


def _names(num_blocks: int) -> list[str]:
    named = {0: "the first block", num_blocks - 1: "the last block"}
    return [named.get(index, "a block") for index in range(num_blocks)]
