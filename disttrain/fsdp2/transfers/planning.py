"""Plans the messages of a model's groups when its root first runs. The plan itself is pure."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from disttrain.fsdp2.machine.group import Bundle, Group
from disttrain.fsdp2.machine.unit import Unit, joined
from disttrain.fsdp2.transfers.forms import TransferCost, may_go_together, plan_form, plan_together

if TYPE_CHECKING:
    import torch

    from disttrain.fsdp2.params.param_group import ParamGroup
    from disttrain.fsdp2.params.sharding import Sharding
    from disttrain.fsdp2.policies import TransferPolicy

CostOf = Callable[["Sharding"], tuple[TransferCost | None, TransferCost | None]]
"""The costs of transfers over the ranks that share parameters, and over those that hold copies; None within a host."""


class PlannedState(Protocol):
    """Modules whose transfers are planned, with their groups of parameters."""

    @property
    def unit(self) -> Unit: ...

    @property
    def groups(self) -> Sequence[ParamGroup]: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def transfers(self) -> TransferPolicy: ...


@dataclass(frozen=True)
class SetPlan:
    """Groups that are reduced as one message, and gathered so where `gathers`: those of some modules."""

    states: tuple[PlannedState, ...]
    groups: tuple[ParamGroup, ...]
    gathers: bool


@dataclass(frozen=True)
class TransferPlan:
    """Plan of how a root's modules, `states`, go over the wire.

    `in_place`: which parameters of each group; `apart`: groups that are reduced over a communicator of their own;
    `sets`: what goes together; `costs`: what was taken for the cost over the ranks that share parameters, if known.
    """

    states: Sequence[PlannedState] = ()
    in_place: dict[ParamGroup, tuple[bool, ...]] = field(default_factory=dict)
    apart: set[ParamGroup] = field(default_factory=set)
    sets: list[SetPlan] = field(default_factory=list)
    costs: dict[ParamGroup, TransferCost | None] = field(default_factory=dict)


def plan_transfers(states: Sequence[PlannedState], cost_of: CostOf, in_buckets: Container[ParamGroup]) -> TransferPlan:
    """A plan for a root and the sharded modules below it, in the order of the modules.

    Groups that are reduced `in_buckets`, before their backward ends, go by themselves.
    """
    plan = TransferPlan(states)
    for state in states:
        for group in state.groups:
            _plan_group(group, state, cost_of, plan)
    for run in _runs(states, cost_of, in_buckets):
        start = 0
        shard_cost, replica_cost = cost_of(run[0].groups[0].sharding)
        set_size = run[0].transfers.together
        cost = replica_cost if shard_cost is None else shard_cost
        for size in plan_together([_whole_bytes(state) for state in run], set_size, cost):
            members = tuple(run[start : start + size])
            start += size
            for sharding, groups in _by_sharding(members).items():
                if len(groups) > 1:
                    gathers = cost_of(sharding)[0] is not None or size > 1 < (set_size or 0)
                    plan.sets.append(SetPlan(members, groups, gathers))
                    if gathers:
                        plan.in_place.update({group: (False,) * len(group.params) for group in groups})
    return plan


def _by_sharding(states: Sequence[PlannedState]) -> dict[Sharding, tuple[ParamGroup, ...]]:
    """The groups of these states; what lies on other ranks, as experts do, goes apart."""
    groups_of: dict[Sharding, tuple[ParamGroup, ...]] = {}
    for group in (group for state in states for group in state.groups):
        groups_of[group.sharding] = (*groups_of.get(group.sharding, ()), group)
    return groups_of


def _plan_group(group: ParamGroup, state: PlannedState, cost_of: CostOf, plan: TransferPlan) -> None:
    cost, _ = cost_of(group.sharding)
    num_shards = group.sharding.num_shards
    sizes = [slot.padded_numel * num_shards * group.compute_dtype.itemsize for slot in group.plan.slots]
    form = state.transfers.form
    is_on_host = state.device.type == "cpu" and form is None
    # Over Gloo the cost of a copy is negligible beside that of the transport.
    plan.in_place[group] = (False,) * len(sizes) if is_on_host else plan_form(sizes, form, cost)
    plan.costs[group] = cost
    asked = state.transfers.reduces_apart
    if num_shards > 1 and (cost is not None if asked is None else asked):
        plan.apart.add(group)


def _runs(
    states: Sequence[PlannedState], cost_of: CostOf, in_buckets: Container[ParamGroup]
) -> Iterator[list[PlannedState]]:
    """States that may go together, each run in the order of the modules."""
    run: list[PlannedState] = []
    for state in states:
        if not state.groups or any(group in in_buckets for group in state.groups):
            continue
        if run and not (_kind(run[0]) == _kind(state) and _may_join(run[0], cost_of) and _may_join(state, cost_of)):
            yield run
            run = []
        run.append(state)
    if run:
        yield run


def _may_join(state: PlannedState, cost_of: CostOf) -> bool:
    """True for what is gathered, freed and reduced with its forward and backward, as others are, and is small."""
    unit = state.unit
    is_prefetched = unit.forward_prefetch is not None or unit.backward_prefetch is not None
    is_kept = not isinstance(unit.reshard_after_forward, bool | None) or not unit.reshard_after_backward
    if is_prefetched or is_kept or not unit.unshards_in_backward:
        # The user has set when it is gathered or freed.
        return False
    if len({group.sharding for group in state.groups}) > 1:
        return False
    costs = cost_of(state.groups[0].sharding)
    return may_go_together(_whole_bytes(state), state.transfers.together, costs)


def _kind(state: PlannedState) -> tuple[object, ...]:
    """Returns a value that is alike for modules that may go together."""
    first = state.groups[0]
    frees = state.unit.reshard_after_forward is not False
    return (first.sharding, state.device, first.is_offloaded, first.reduces_as, state.transfers, frees)


def _whole_bytes(state: PlannedState) -> int:
    return sum(
        group.plan.shard_numel * group.sharding.num_shards * group.compute_dtype.itemsize for group in state.groups
    )


def carry_out(plan: TransferPlan) -> list[Bundle]:
    """Let groups and modules do as planned. Communicates nothing. Returns what goes together."""
    for state in plan.states:
        state.unit.mates = frozenset()
    for group, in_place in plan.in_place.items():
        group.in_place, group.state.bundle = in_place, None
        world = group.sharding.mesh.world
        shards = group.sharding.shard_group
        group.reduced_apart = world.shared_group(shards.members, "reductions") if group in plan.apart else None
        if group.reduced_apart is not None:
            group.reduced_apart.axis_name = shards.axis_name
    groups = {group: group.state for group in plan.in_place}
    units = {state.unit: state.unit for state in plan.states}
    return [bundle_of(each, groups, units) for each in plan.sets]


def bundle_of(plan: SetPlan, groups: Mapping[ParamGroup, Group], units: Mapping[Unit, Unit]) -> Bundle:
    """Let what stands for the groups and units of the plan go over the wire together."""
    units_of_plan = [units[state.unit] for state in plan.states]
    return joined([groups[group] for group in plan.groups], units_of_plan, gathers=plan.gathers)
