"""How parameters go over the wire: in which form, how many modules' together, in how many launches and collectives.

By the rules that `fully_shard` plans by itself (`fsdp2/transfers/forms.py`), for a model whose blocks are sharded one
by one, and then the model, or a pipeline's stage, with what is in no block. What the links cost is the hardware's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from disttrain.fsdp2.transfers.forms import (
    TransferCost,
    may_go_together,
    plan_form,
    plan_together,
    reduce_buckets,
    reduces_in_place,
)
from disttrain.plan.job import Choice, Job
from disttrain.plan.model.parts import StageParts, parameters_of_block, parameters_outside
from disttrain.plan.time.links import link_of

Form = tuple[bool, ...]
"""Which parameters are in their places as they are gathered."""


@dataclass(frozen=True)
class Counts:
    """Of calls that are one launch each, and of the collectives in them."""

    num_calls: int = 0
    num_collectives: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.num_calls + other.num_calls, self.num_collectives + other.num_collectives)

    def __mul__(self, times: int) -> Counts:
        return Counts(times * self.num_calls, times * self.num_collectives)


@dataclass(frozen=True)
class Transfers:
    """Of one stage, or of the whole model.

    Args: block  the form of a block's parameters;  outside  of those in no block;  sets  of how many modules each goes
          that are one after the other, as one message;  gathers_sets  not only reduces them so;  early  parts of what
          is outside, by their places there, that are reduced before the backward ends, or one;  has_outside_in_sets
          the first module of the sets is what is in no block.
    """

    block: Form
    outside: Form
    sets: tuple[int, ...]
    gathers_sets: bool
    early: tuple[tuple[int, ...], ...]
    has_outside_in_sets: bool

    def gathers(self, *, outside_once: bool) -> Counts:
        """Of all parameters, for a forward and for its backward. `outside_once`: what is in no block stays whole
        between them; else everything is gathered once."""
        every = self._forms()
        first = sum((self._gathers_of(forms) for forms in every), Counts())
        if self.outside and not self.has_outside_in_sets:
            first += _launch(sum(self.outside), len(self.outside))
        if not outside_once:
            return first
        if self.has_outside_in_sets:
            every[0] = every[0][1:]
        return sum((self._gathers_of(forms) for forms in every if forms), first)

    def reductions(self, *, is_scheduled: bool) -> Counts:
        """Of all gradients. A pipeline's schedule reduces nothing before the backward ends."""
        counts = Counts()
        for forms in self._forms():
            joint = [place for form in forms for place in form]
            num_in_place = sum(joint) if len(forms) == 1 or reduces_in_place(forms) else 0
            counts += _launch(num_in_place, len(joint))
        if self.has_outside_in_sets or not self.outside:
            return counts
        parts = [range(len(self.outside))] if is_scheduled else self.early
        for part in parts:
            counts += _launch(sum(self.outside[place] for place in part), len(part))
        return counts

    def _forms(self) -> list[list[Form]]:
        """Of the modules of each set."""
        every = [self.outside] * self.has_outside_in_sets + [self.block] * (sum(self.sets) - self.has_outside_in_sets)
        ends = [sum(self.sets[: place + 1]) for place in range(len(self.sets))]
        return [every[end - size : end] for end, size in zip(ends, self.sets, strict=True)]

    def _gathers_of(self, forms: Sequence[Form]) -> Counts:
        if self.gathers_sets and len(forms) > 1:
            return _launch(0, 1)
        return sum((_launch(sum(form), len(form)) for form in forms), Counts())

    def __str__(self) -> str:
        words = [f"blocks {_in_words(self.block)}", f"the rest {_in_words(self.outside)}" if self.outside else ""]
        sizes = sorted({size for size in self.sets if size > 1})
        if sizes:
            verb = "gathered and reduced" if self.gathers_sets else "reduced"
            words.append(f"{' or '.join(map(str, sizes))} modules {verb} together")
        return ", ".join(filter(None, words))


def transfers_of(job: Job, choice: Choice, stage: StageParts) -> Transfers:
    """How the parameters of a stage go, of which a rank of tensor parallel has its part."""
    mesh, itemsize = choice.mesh, job.precision.compute_bytes
    shard_cost, replica_cost = (_cost_over(job, choice, axis) for axis in ("dp", "replicate"))
    block = [_whole_bytes(each, mesh.dp, itemsize) for each in parameters_of_block(job.sizes, mesh.tp)]
    children, outside = parameters_outside(job.sizes, mesh.tp, stage)
    outside_bytes = [_whole_bytes(each, mesh.dp, itemsize) for each in outside]
    parts = reduce_buckets(children, [rows * columns * job.precision.parameter_bytes for rows, columns in outside])
    costs = shard_cost, replica_cost
    is_late = bool(outside) and len(parts) == 1
    blocks_join = may_go_together(sum(block), None, costs)
    outside_joins = is_late and blocks_join and may_go_together(sum(outside_bytes), None, costs)
    modules = [sum(outside_bytes)] * outside_joins + [sum(block)] * stage.num_blocks
    cost = replica_cost if shard_cost is None else shard_cost
    sets = plan_together(modules, None, cost) if blocks_join else [1] * len(modules)
    gathers_sets = shard_cost is not None
    forms = [plan_form(sizes, None, shard_cost) for sizes in (block, outside_bytes)]
    return Transfers(
        block=forms[0],
        outside=forms[1] if outside else (),
        sets=tuple(sets),
        gathers_sets=gathers_sets,
        early=tuple(map(tuple, parts)) if outside else (),
        has_outside_in_sets=outside_joins,
    )


def _cost_over(job: Job, choice: Choice, axis: str) -> TransferCost | None:
    """None where the ranks of the axis are on one node. A link says what a rank sends, a cost what all ranks gather."""
    num_ranks = choice.mesh.size(axis)
    if choice.mesh.num_on_node(axis, job.node_size) == num_ranks:
        return None
    link = link_of(job, choice, axis)
    return TransferCost(link.gather_latency_s, link.bytes_per_s * num_ranks / (num_ranks - 1))


def _whole_bytes(shape: tuple[int, int], num_ranks: int, itemsize: int) -> int:
    """Of a parameter that is cut along its rows, with its padding."""
    rows, columns = shape
    return -(-rows // num_ranks) * num_ranks * columns * itemsize


def _launch(num_in_place: int, num_parameters: int) -> Counts:
    """Each that is in place is a collective; all others are one."""
    return Counts(1, num_in_place + (num_in_place < num_parameters))


def _in_words(form: Form) -> str:
    return "in place" if all(form) else "mixed" if any(form) else "flat"
