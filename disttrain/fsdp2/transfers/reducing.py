"""Reductions of unsharded gradients into those of the shards: of one group's, or of several's as one message."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch

from disttrain.dtensor.gradients.settled import settle_together
from disttrain.fsdp2._torch import out_of_grad
from disttrain.fsdp2.params.flat import FlatPlan, plan_flat
from disttrain.fsdp2.params.param import ShardedParam
from disttrain.fsdp2.transfers.collectives import Averaging, Reduction, ReductionPlan, start_reduction
from disttrain.fsdp2.transfers.comm import UnderWay
from disttrain.fsdp2.transfers.forms import reduces_in_place

if TYPE_CHECKING:
    from disttrain.fsdp2.params.param_group import ParamGroup

Owed = tuple["ParamGroup", Sequence[ShardedParam]]
"""Parameters of a group whose gradients are to be reduced."""


class _Part:
    """The gradients that one group gives to a reduction."""

    def __init__(
        self, group: ParamGroup, params: Sequence[ShardedParam], *, all_receive: bool, may_be_in_place: bool
    ) -> None:
        """Takes the unsharded gradients. A trained parameter without one takes part with zeros, so that sizes agree on
        all ranks; it gets none unless all receive."""
        self.group = group
        self.params: Sequence[ShardedParam]
        num_in_place = sum(group.in_place) if may_be_in_place else 0
        is_in_order = num_in_place in (0, len(group.params))
        if params is group.params and is_in_order and not group.unreduced and (taken := group.take_grads()):
            # As a rule. One by one, as below, they take three times as long.
            self.params, self.num_in_place, self.plan = params, num_in_place, group.plan
            self.receivers: Sequence[ShardedParam | None] = params
            self.grads = taken
            return
        trained = [param for param in params if param.is_trained or param in group.unreduced]
        self.params, self.num_in_place = trained, 0
        if may_be_in_place and any(group.in_place):
            in_place = dict(zip(group.params, group.in_place, strict=True))
            self.params = sorted(trained, key=lambda param: not in_place[param])
            self.num_in_place = sum(in_place[param] for param in trained)
        is_whole = self.params == group.params
        self.plan = group.plan if is_whole else plan_of(group, self.params)
        with out_of_grad():
            grads = [param.unsharded_grad() for param in self.params]
            receives_anyway = all_receive or group.state.reduces_unused
            self.receivers = [
                param if grad is not None or receives_anyway or param in group.unreduced else None
                for param, grad in zip(self.params, grads, strict=True)
            ]
            for param in self.params:
                param.drop_grad()
            self.grads = [
                torch.zeros(slot.shape, dtype=group.compute_dtype, device=group.device) if grad is None else grad
                for grad, slot in zip(grads, self.plan.slots, strict=True)
            ]

    def fits(self, dtype: torch.dtype) -> bool:
        """True if parameters can have these gradients as they are, without what `dtype` would round off."""
        kept = self.group.orig_dtype
        return (
            torch.promote_types(kept, dtype) == dtype
            and not self.group.is_offloaded
            and all(param.dim == 0 for param in self.params)
            and all(grad.dtype == kept and grad.is_contiguous() for grad in self.grads)
        )


def reduce_together(owed: Sequence[Owed], scale: float | None = None) -> None:
    """Start averaging unsharded gradients over the ranks into the sharded parameters', as one message. Collective.

    A schedule gives `scale`; then all trained parameters receive a gradient.
    """
    first = owed[0][0]
    comm = first.own_comm()
    of_others = [param for _, params in owed for param in params if param.unsharded_spec is not None]
    if of_others:
        settle_together(param.unsharded for param in of_others if param.unsharded is not None)
    # Parameters in place come first in a message. If it has several groups, either all of their parameters are in place
    # or none.
    may_be_in_place = len(owed) == 1 or reduces_in_place([group.in_place for group, _ in owed])
    parts = [
        _Part(group, params, all_receive=scale is not None, may_be_in_place=may_be_in_place) for group, params in owed
    ]
    sharding, dtype = first.sharding, first.reduce_dtype
    reduction_plan = _plan_for(first, 1.0 if scale is None else scale, sum([part.num_in_place for part in parts]))
    with out_of_grad():
        grads = parts[0].grads if len(parts) == 1 else [*chain.from_iterable(part.grads for part in parts)]
        unreduced = _unreduced(parts)
        is_direct = reduction_plan.changes_nothing(unreduced) and all(part.fits(dtype) for part in parts)
        if not is_direct and len({grad.dtype for grad in grads}) > 1:
            grads = [grad.to(dtype) for grad in grads]
        plan = parts[0].plan if len(parts) == 1 else _joined([part.plan for part in parts])
        if is_direct:
            reduction = Reduction(grads[0].new_empty(0), ())
        else:
            reduction = start_reduction(grads, plan, dtype, reduction_plan, unreduced, comm.streams)
    is_complete = first.state.reduces_over_replicas or sharding.replicate_group is None
    end = plan.shard_numel
    # The last module first, as backward goes: a hook of one finds the gradients of those that come after it.
    for part in reversed(parts):
        end -= part.plan.shard_numel
        grads_of_part = part.grads if is_direct else None
        comm.reducing.append(
            UnderWay(part.group, reduction, end, part.plan, part.receivers, is_complete, grads_of_part)
        )


def _plan_for(group: ParamGroup, scale: float, num_in_place: int) -> ReductionPlan:
    """The plan of a reduction of this group, or of several of which it is the first; as the last time where nothing
    that it follows from has changed."""
    sharding, dtype, over_replicas = group.sharding, group.reduce_dtype, group.state.reduces_over_replicas
    shard_group, factor, only_sums = group.reduction_group(), group.divide_factor, group.only_sums
    facts = (scale, num_in_place, dtype, over_replicas, shard_group, factor, only_sums, group.hook, group.hook_stream)
    if group.planned_reduction is None or group.planned_reduction[0] != facts:
        factor = sharding.num_data_ranks if factor is None and only_sums else factor
        averaging = Averaging.over(sharding, dtype, factor, scale)
        plan = ReductionPlan(
            sharding, shard_group, averaging, over_replicas, group.hook, group.hook_stream, num_in_place
        )
        group.planned_reduction = facts, plan
    return group.planned_reduction[1]


def plan_of(group: ParamGroup, params: Sequence[ShardedParam]) -> FlatPlan:
    """Lays shards of some of the group's parameters out in a buffer."""
    return plan_flat([param.front_shape for param in params], group.sharding.num_shards)


def _joined(plans: Sequence[FlatPlan]) -> FlatPlan:
    shapes = [slot.shape for plan in plans for slot in plan.slots]
    return plan_flat(shapes, plans[0].num_shards)


def _unreduced(parts: Sequence[_Part]) -> torch.Tensor | None:
    """Returns what earlier backward passes have left to be reduced over the replicas, laid out as the parts are."""
    if not any(part.group.unreduced for part in parts):
        return None
    left_over = [
        (part.group.unreduced.pop(param, None), numel)
        for part in parts
        for param, numel in zip(part.params, part.plan.split_sizes, strict=True)
    ]
    example = next((unreduced for unreduced, _ in left_over if unreduced is not None), None)
    if example is None:
        return None
    return torch.cat([example.new_zeros(numel) if unreduced is None else unreduced for unreduced, numel in left_over])
