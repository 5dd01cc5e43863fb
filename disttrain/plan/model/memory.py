"""Memory of the fullest rank at its fullest moment, part by part.

What comes and goes of parameters and gradients is what the machine of `fully_shard` says (`plan/sharding/step.py`).
Added to that are what rests, and the activations that blocks keep by then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property

from disttrain.fsdp2.estimating.rehearsal import LOSS, REDUCTIONS, STEADY
from disttrain.fsdp2.estimating.values import REDUCED, Peak
from disttrain.pipelining.schedule.action import Op
from disttrain.pipelining.schedule.liveness import KeptActivations
from disttrain.pipelining.schedule.schedule import Schedule
from disttrain.plan.job import Choice, Job
from disttrain.plan.model.activations import Kept, kept_of
from disttrain.plan.model.context import slots_bytes
from disttrain.plan.model.parts import (
    StageParts,
    elements_of,
    fewer_microbatches,
    parts_of,
    parts_of_ranks,
    schedule_of,
)
from disttrain.plan.sharding.step import step_of
from disttrain.plan.sharding.transfers import ModelSharding


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank at its fullest moment.

    Args: unsharded  parameters that are gathered, their gradients, and these packed for their reduction;  temporaries
          of the block that goes backward, with checkpoints all that it computes again;  exchange  rows of tokens on
          their way to experts and back;  messages  of a pipeline, and keys of others along cp.
    """

    parameters: int
    gradients: int
    optimizer: int
    unsharded: int
    activations: int
    loss: int
    temporaries: int
    exchange: int
    messages: int
    when: str = ""

    @cached_property
    def total_bytes(self) -> int:
        return sum(self.by_part.values())

    @property
    def by_part(self) -> dict[str, int]:
        return {part.name: getattr(self, part.name) for part in fields(self) if part.name != "when"}


def memory_of(job: Job, choice: Choice) -> Memory:
    """Of all ranks and moments, the fullest. Raises: ScheduleError when there is no such schedule."""
    return max(_moments(job, choice), key=lambda memory: memory.total_bytes)


def has_room(job: Job, choice: Choice) -> bool:
    """True where every rank has room at every moment. Raises: ScheduleError when there is no such schedule."""
    return all(memory.total_bytes <= job.usable_bytes for memory in _moments(job, choice))


def _moments(job: Job, choice: Choice) -> Iterator[Memory]:
    """Yields what ranks hold when they can be fullest."""
    return _pipeline(job, choice) if choice.schedule else iter(_plain(job, choice))


def resting_bytes(job: Job, choice: Choice) -> int:
    """Returns the parameters and optimizer state of the rank that has most: less than any choice on this mesh takes at
    its peak."""
    kinds = dict.fromkeys(parts_of(job, choice))
    return max(sum(_resting(job, choice, [stage]).values()) for stage in kinds)


def _plain(job: Job, choice: Choice) -> list[Memory]:
    """Without a pipeline: what `fully_shard` holds in each stretch of a step, and what blocks keep then."""
    kept_bytes, (stages,) = kept_of(job, choice), parts_of_ranks(job, choice)
    resting = _resting(job, choice, stages)

    def memory(stretch: Peak) -> Memory:
        is_loss = stretch.when == LOSS
        return Memory(
            **resting,
            **_coming_of(job, choice, stages, stretch),
            activations=stretch.num_kept * kept_bytes.block + kept_bytes.head * is_loss,
            loss=kept_bytes.loss * is_loss,
            temporaries=kept_bytes.inside * stretch.is_backward,
            exchange=kept_bytes.exchange * (not is_loss and stretch.num_kept > 0),
            messages=slots_bytes(job, choice),
            when=stretch.when,
        )

    return list(map(memory, step_of(ModelSharding.of(job, choice), choice, stages).stretches))


def _pipeline(job: Job, choice: Choice) -> Iterator[Memory]:
    """With one: a rank's stages are unsharded from its first computation to its last, with the sums of their gradients.
    In the end all reductions are under way at once."""
    assert choice.schedule is not None
    kept_bytes, sharding = kept_of(job, choice), ModelSharding.of(job, choice)
    fewer = fewer_microbatches(choice.schedule, choice.mesh.pp, choice.num_microbatches)
    num_blocks = tuple(stage.num_blocks for stage in parts_of(job, choice))
    moments = profiles(choice.pipeline, fewer, num_blocks)
    seen = set()
    for rank, stages in enumerate(parts_of_ranks(job, choice)):
        fullest = max(moments[rank], key=lambda moment: sum(_coming_and_going(kept_bytes, moment)))
        if (stages, fullest) in seen:
            continue
        seen.add((stages, fullest))
        for stretch in step_of(sharding, choice, stages).stretches:
            if stretch.when not in (STEADY, REDUCTIONS):
                continue
            is_steady = stretch.when == STEADY
            activations, loss, temporaries = _coming_and_going(kept_bytes, fullest) if is_steady else (0, 0, 0)
            yield Memory(
                **_resting(job, choice, stages),
                **_coming_of(job, choice, stages, stretch),
                activations=activations,
                loss=loss,
                temporaries=temporaries,
                exchange=kept_bytes.exchange * (is_steady and not fullest[2]),
                messages=2 * kept_bytes.message * len(stages) + slots_bytes(job, choice),
                when=f"{LOSS if is_steady and fullest[2] else stretch.when} of pipeline rank {rank}",
            )


def _resting(job: Job, choice: Choice, stages: Sequence[StageParts]) -> dict[str, int]:
    shard = _shard(job, choice, stages)
    return {"parameters": shard * job.precision.parameter_bytes, "optimizer": shard * job.precision.state_bytes}


def _shard(job: Job, choice: Choice, stages: Sequence[StageParts]) -> int:
    """Elements of parameters that the rank has."""
    mesh = choice.mesh
    elements = elements_of(job.sizes, mesh.tp, mesh.ep)
    is_tied = job.sizes.is_tied and choice.schedule is None
    experts = -(-sum(map(elements.experts_of, stages)) // mesh.num_expert_shards)
    return -(-sum(elements.of(stage, is_tied=is_tied) for stage in stages) // mesh.num_shards) + experts


def _coming_of(job: Job, choice: Choice, stages: Sequence[StageParts], stretch: Peak) -> dict[str, int]:
    """Returns the bytes of a stretch that are gathered parameters, sums and packed gradients, and reduced gradients."""
    total, gradients = stretch.num_bytes, stretch.by_kind.get(REDUCED, 0)
    if job.precision.is_sharded:
        return {"gradients": gradients, "unsharded": total - gradients}
    # Plain gradients: those of microbatches before are there all the time.
    has_all = choice.schedule is not None or choice.num_microbatches > 1
    every = _shard(job, choice, stages) * job.precision.parameter_bytes
    return {"gradients": every if has_all else total, "unsharded": 0}


_Moment = tuple[int, int, int]


def _coming_and_going(kept_bytes: Kept, moment: _Moment) -> tuple[int, int, int]:
    """Activations, what the loss takes, and temporaries."""
    live, pending, has_loss = moment
    activations = live * kept_bytes.block + pending * kept_bytes.pending + has_loss * kept_bytes.head
    return activations, has_loss * kept_bytes.loss, (1 - has_loss) * kept_bytes.inside


@cache
def profiles(
    pipeline: tuple[str, int, int | None], num_microbatches: int, num_blocks: tuple[int, ...]
) -> list[list[_Moment]]:
    """Of each rank, the moments in which it can be fullest: blocks kept between forward and backward, blocks kept
    between the halves of backward, and 1 where the loss is computed."""
    schedule = schedule_of(pipeline, num_microbatches)
    return [_profile(schedule, num_blocks, rank) for rank in range(schedule.num_ranks)]


def _profile(schedule: Schedule, num_blocks: tuple[int, ...], rank: int) -> list[_Moment]:
    """Numbers of blocks on one rank that are kept between forward and backward, and between the two halves of backward,
    and 1 where the loss is computed or differentiated: of all moments those that no other exceeds in all three."""
    last = schedule.num_stages - 1
    seen = {(0, 0, 0)}
    for action, live, pending in KeptActivations(num_blocks, num_blocks).moments(schedule.ranks[rank]):
        parts = () if action is None else action.parts
        has_loss = any(part.stage == last and part.op is not Op.BACKWARD_WEIGHT for part in parts)
        seen |= {(int(live), int(pending), 0), (int(live), int(pending), int(has_loss))}
    return [moment for moment in seen if not any(_exceeds(other, moment) for other in seen)]


def _exceeds(other: _Moment, moment: _Moment) -> bool:
    # Without a loss there are temporaries instead, which may be more.
    return other != moment and other[0] >= moment[0] and other[1] >= moment[1] and other[2] == moment[2]
