"""What the fullest rank holds at its fullest moment, part by part.

A step is looked at where it can be fullest: when the loss is computed, when the head's gradient is reduced, when the
last block and when the first one go backward, and when the last gradient is reduced. In between everything grows or
shrinks in a straight line.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache

from disttrain.pipelining.schedule.action import Op
from disttrain.pipelining.schedule.liveness import KeptActivations
from disttrain.pipelining.schedule.schedule import Schedule
from disttrain.plan.job import Choice, Job
from disttrain.plan.model.activations import Kept, kept_of
from disttrain.plan.model.parts import (
    Elements,
    StageParts,
    elements_of,
    fewer_microbatches,
    parts_of,
    schedule_of,
    stages_of_ranks,
)


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank at its fullest moment.

    Args: unsharded  parameters that are gathered, their gradients, and these packed for their reduction;  temporaries
          of the block that goes backward, with checkpoints all that it computes again.
    """

    parameters: int
    gradients: int
    optimizer: int
    unsharded: int
    activations: int
    loss: int
    temporaries: int
    messages: int
    when: str = ""

    @property
    def total_bytes(self) -> int:
        return sum(self.by_part.values())

    @property
    def by_part(self) -> dict[str, int]:
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "when"}


def memory_of(job: Job, choice: Choice) -> Memory:
    """Of all ranks and moments, the fullest. Raises: ScheduleError when there is no such schedule."""
    moments = _pipeline(job, choice) if choice.schedule else _plain(job, choice)
    return max(moments, key=lambda one: one.total_bytes)


def resting_bytes(job: Job, choice: Choice) -> int:
    """What is there all the time on the rank that has most: less than any choice on this mesh takes at its peak."""
    elements, stages = elements_of(job.sizes, choice.mesh.tp), parts_of(job, choice)
    most = max(elements.of(stage, is_tied=job.sizes.is_tied) for stage in stages)
    return _shard(most, choice) * (job.precision.parameter_bytes + job.precision.state_bytes)


def _shard(num_elements: int, choice: Choice) -> int:
    return -(-num_elements // choice.mesh.dp)


@dataclass(frozen=True)
class _Parameters:
    """Bytes of parameters on one rank of a mesh: whole, or this rank's part of them."""

    job: Job
    choice: Choice
    elements: Elements

    def resting(self, num_elements: int, *, has_gradients: bool) -> dict[str, int]:
        precision, shard = self.job.precision, _shard(num_elements, self.choice)
        return {
            "parameters": shard * precision.parameter_bytes,
            "optimizer": shard * precision.state_bytes,
            "gradients": shard * precision.parameter_bytes * has_gradients,
        }

    def whole(self, num_elements: int) -> int:
        """To compute with; parameters that are not sharded are that themselves."""
        return num_elements * self.job.precision.compute_bytes * self.job.precision.is_sharded

    def packed(self, num_elements: int) -> int:
        """What a reduction takes of each rank, and leaves it."""
        precision = self.job.precision
        return (num_elements + _shard(num_elements, self.choice)) * precision.reduce_bytes * precision.is_sharded

    def gradients(self, num_elements: int) -> int:
        return _shard(num_elements, self.choice) * self.job.precision.parameter_bytes


def _plain(job: Job, choice: Choice) -> list[Memory]:
    """Without a pipeline: blocks are gathered one by one, the one that comes next beforehand. Of several microbatches
    the last one is looked at: it reduces the sums of all, or adds its reduced gradients to those before."""
    elements, kept = elements_of(job.sizes, choice.mesh.tp), kept_of(job, choice)
    sizes, of = job.sizes, _Parameters(job, choice, elements)
    stage = StageParts(sizes.num_layers, has_embedding=True, has_head=True)
    num_elements, outside = elements.of(stage, is_tied=sizes.is_tied), elements.outside(stage, is_tied=sizes.is_tied)
    is_sharded, has_several = job.precision.is_sharded, choice.num_microbatches > 1
    sums_wholes = has_several and is_sharded and not choice.reduces_each
    # Those of microbatches before, of this rank's shards.
    has_gradients = has_several and not sums_wholes
    resting = of.resting(num_elements, has_gradients=has_gradients)
    root, block = of.whole(outside), of.whole(elements.block)
    above = elements.head + elements.block * (sizes.num_layers - 1)

    def moment(when: str, *, reduced: int, whole: int, unreduced: int, **others: int) -> Memory:
        sums = unreduced * job.precision.reduce_bytes * sums_wholes
        held = {"activations": 0, "loss": 0, "temporaries": 0, "messages": 0} | others
        gradients = resting["gradients"] + of.gradients(reduced) * (not has_gradients)
        return Memory(**resting | {"gradients": gradients}, unsharded=whole + sums, **held, when=when)

    blocks = sizes.num_layers * kept.block
    return [
        moment(
            "the loss",
            reduced=0,
            unreduced=num_elements,
            whole=root + block,
            activations=blocks + kept.head,
            loss=kept.loss,
        ),
        moment(
            "the reduction of the head",
            reduced=0,
            unreduced=num_elements,
            whole=root + block + of.packed(elements.head) + of.whole(elements.head) * (not sums_wholes),
            activations=blocks,
        ),
        moment(
            "the backward of the last block",
            reduced=elements.head,
            unreduced=num_elements - elements.head,
            whole=root + 3 * block + of.packed(elements.block),
            activations=blocks,
            temporaries=kept.inside,
        ),
        moment(
            "the backward of the first block",
            reduced=above,
            unreduced=elements.block + elements.embedding,
            whole=root + 3 * block + of.packed(elements.block),
            activations=kept.block,
            temporaries=kept.inside,
        ),
        moment(
            "the last reduction",
            reduced=num_elements,
            unreduced=elements.embedding,
            whole=root + of.whole(elements.embedding) + of.packed(elements.embedding),
        ),
    ]


def _pipeline(job: Job, choice: Choice) -> list[Memory]:
    """With one: a rank's stages are whole from its first computation to its last, and so are sums of their gradients,
    which `fully_shard` keeps in the dtype of their reduction. In the end all reductions are under way at once, and what
    they read, packed, is there beside what they leave."""
    assert choice.schedule is not None
    precision, kept = job.precision, kept_of(job, choice)
    of = _Parameters(job, choice, elements_of(job.sizes, choice.mesh.tp))
    stages, fewer = parts_of(job, choice), fewer_microbatches(choice.schedule, choice.mesh.pp, choice.num_microbatches)
    moments = profiles(choice.schedule, choice.mesh.pp, fewer, tuple(stage.num_blocks for stage in stages))
    found = []
    for rank, own in enumerate(stages_of_ranks(choice.schedule, choice.mesh.pp)):
        num_elements = sum(of.elements.of(stages[stage], is_tied=False) for stage in own)
        live, pending, has_loss = max(moments[rank], key=lambda moment: sum(_coming_and_going(kept, moment)))
        activations, loss, temporaries = _coming_and_going(kept, (live, pending, has_loss))
        found.append(
            Memory(
                **of.resting(num_elements, has_gradients=not precision.is_sharded),
                unsharded=of.whole(num_elements) + num_elements * precision.reduce_bytes * precision.is_sharded,
                activations=activations,
                loss=loss,
                temporaries=temporaries,
                messages=2 * kept.message * len(own),
                when=f"the {'loss' if has_loss else 'steady phase'} of pipeline rank {rank}",
            )
        )
        if precision.is_sharded:
            largest = max(of.elements.block, *(of.elements.outside(stages[stage], is_tied=False) for stage in own), 0)
            found.append(
                Memory(
                    **of.resting(num_elements, has_gradients=True),
                    unsharded=of.whole(num_elements) + (num_elements + largest) * precision.reduce_bytes,
                    activations=0,
                    loss=0,
                    temporaries=0,
                    messages=2 * kept.message * len(own),
                    when=f"the reductions of pipeline rank {rank}",
                )
            )
    return found


_Moment = tuple[int, int, int]


def _coming_and_going(kept: Kept, moment: _Moment) -> tuple[int, int, int]:
    """Activations, what the loss takes, and temporaries."""
    live, pending, has_loss = moment
    activations = live * kept.block + pending * kept.pending + has_loss * kept.head
    return activations, has_loss * kept.loss, (1 - has_loss) * kept.inside


@cache
def profiles(name: str, num_ranks: int, num_microbatches: int, num_blocks: tuple[int, ...]) -> list[list[_Moment]]:
    """Of each rank, the moments in which it can be fullest: blocks kept between forward and backward, blocks kept
    between the halves of backward, and 1 where the loss is computed."""
    schedule = schedule_of(name, num_ranks, num_microbatches)
    return [_profile(schedule, num_blocks, rank) for rank in range(num_ranks)]


def _profile(schedule: Schedule, num_blocks: tuple[int, ...], rank: int) -> list[_Moment]:
    """Numbers of blocks on one rank that are kept between forward and backward, and between the two halves of backward,
    and 1 where the loss is computed or differentiated: of all moments those that no other exceeds in all three."""
    last = schedule.num_stages - 1
    seen = {(0, 0, 0)}
    for action, live, pending in KeptActivations(num_blocks, num_blocks).moments(schedule.ranks[rank]):
        parts = () if action is None else action.parts
        has_loss = any(part.stage == last and part.op is not Op.BACKWARD_WEIGHT for part in parts)
        seen |= {(int(live), int(pending), 0), (int(live), int(pending), int(has_loss))}
    return [one for one in seen if not any(_exceeds(other, one) for other in seen)]


def _exceeds(other: _Moment, one: _Moment) -> bool:
    # Without a loss there are temporaries instead, which may be more.
    return other != one and other[0] >= one[0] and other[1] >= one[1] and other[2] == one[2]
