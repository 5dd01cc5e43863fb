"""Measures a sharded model: its groups as sizes for a rehearsal, and what a rank holds of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from disttrain.fsdp2._torch import own_parameters
from disttrain.fsdp2.estimating.values import GroupSizes, ParamSizes, SizedModule, Use
from disttrain.fsdp2.machine.group import Buckets, Group
from disttrain.fsdp2.machine.unit import Unit
from disttrain.fsdp2.params.buckets import buckets_of
from disttrain.fsdp2.params.extensions import ExtensionGroup
from disttrain.fsdp2.params.flat import plan_flat
from disttrain.fsdp2.params.param import ShardedParam
from disttrain.fsdp2.params.param_group import ParamGroup
from disttrain.fsdp2.params.unsharded import unsharded_offsets
from disttrain.fsdp2.state import ShardState, state_of
from disttrain.fsdp2.transfers.forms import TransferCost
from disttrain.fsdp2.transfers.planning import TransferPlan, bundle_of, plan_transfers

OptimizerCost = float | Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_PROBE_SIZE = 64


class OptimizerBytes:
    """Bytes that an optimizer keeps for an element, measured on a small matrix for each dtype."""

    def __init__(self, cost: OptimizerCost) -> None:
        self._cost = cost
        self._known: dict[torch.dtype, float] = {}

    def per_element(self, dtype: torch.dtype) -> float:
        """Bytes for an element of a parameter of this dtype."""
        if isinstance(self._cost, int | float):
            return self._cost
        if dtype not in self._known:
            with torch.inference_mode(False), torch.device("cpu"):
                probe = nn.Parameter(torch.zeros(_PROBE_SIZE, _PROBE_SIZE, dtype=dtype, device="cpu"))
                probe.grad = torch.zeros_like(probe)
                optimizer = self._cost([probe])
                optimizer.step()
            # Single numbers, such as the count of steps, do not grow with the parameter.
            states = [value for value in optimizer.state[probe].values() if isinstance(value, torch.Tensor)]
            self._known[dtype] = sum(value.nbytes for value in states if value.numel() > 1) / probe.numel()
        return self._known[dtype]


@dataclass(frozen=True)
class Held:
    """Bytes that a rank holds."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0

    def __add__(self, other: Held) -> Held:
        return Held(
            self.parameters + other.parameters, self.gradients + other.gradients, self.optimizer + other.optimizer
        )


def held_of_group(group: ParamGroup, optimizer: OptimizerBytes) -> Held:
    """Counts what the first rank holds of a group; of parameters and gradients, every rank."""
    plan = plan_flat([param.front_shape for param in group.params], group.sharding.num_shards)
    trained = sum(slot.padded_numel for param, slot in zip(group.params, plan.slots, strict=True) if _is_trained(param))
    dtype = group.params[0].orig_dtype
    per_element = optimizer.per_element(dtype) if trained else 0
    return Held(plan.shard_numel * dtype.itemsize, trained * dtype.itemsize, round(trained * per_element))


def held_unsharded(root: ShardState, groups: list[ParamGroup], optimizer: OptimizerBytes) -> Held:
    """Counts what a rank holds of parameters outside all groups: the whole of each."""
    taken = {(owner.module, owner.name) for group in groups for param in group.params for owner in param.owners}
    untaken = {
        parameter
        for module in root.module.modules()
        for name, parameter in own_parameters(module)
        if (module, name) not in taken
    }
    total = Held(sum(parameter.nbytes for parameter in untaken))
    for parameter in untaken:
        if parameter.requires_grad:
            total += Held(0, parameter.nbytes, round(parameter.numel() * optimizer.per_element(parameter.dtype)))
    return total


class Sizing:
    """A sharded model as sizes: `root` and `bundles` for a rehearsal, `groups` the groups of parameters in it, `plan`
    how they go over the wire."""

    def __init__(self, root: ShardState, network: TransferCost | None) -> None:
        """`network`: what a gather costs between hosts, where ranks that share parameters, or hold copies, are on
        several. None: they are on one, or where a root has run already, where they are."""
        states = _states_below(root)
        self.groups = [group for state in states for group in state.groups]
        self.plan = _plan_of(root, states, network)
        self._groups: dict[ParamGroup, Group] = {}
        self._sized: dict[ShardState, SizedModule] = {}
        self._names = {module: name or type(module).__name__ for name, module in root.module.named_modules()}
        self.root = self._module(root, is_root=True)
        of_unit = {state.unit: sized.unit for state, sized in self._sized.items()}
        for real_unit, unit in of_unit.items():
            for name in ("forward_prefetch", "backward_prefetch"):
                chosen = getattr(real_unit, name)
                setattr(unit, name, chosen and [of_unit[each] for each in chosen if each in of_unit])
        self.bundles = [bundle_of(each, self._groups, of_unit) for each in self.plan.sets]

    def _module(self, state: ShardState, *, is_root: bool) -> SizedModule:
        if state in self._sized:
            return self._sized[state]
        uses: dict[tuple[nn.Module, str], Use] = {}
        for group in state.groups:
            in_place = self.plan.in_place[group]
            params = {
                param: _param_sizes(group, param, is_in_place=is_in_place)
                for param, is_in_place in zip(group.params, in_place, strict=True)
            }
            sized_group = self._groups[group] = Group(_group_sizes(group, params), keeps_part=group.keeps_part)
            buckets = buckets_of(state.modules, group) if is_root else []
            if buckets:
                sized_group.buckets = Buckets([[params[param] for param in bucket] for bucket in buckets])
            for param, sizes in params.items():
                uses.update({(owner.module, owner.name): (sized_group, sizes) for owner in param.owners})
        unit = Unit([self._groups[group] for group in state.groups], state.modules, state.unit.reshard_after_forward)
        unit.unshards_in_backward = state.unit.unshards_in_backward
        sized = self._sized[state] = SizedModule(self._names[state.module], unit)
        sized.body = list(self._body(state.module, uses))
        return sized

    def _body(self, module: nn.Module, uses: dict[tuple[nn.Module, str], Use]) -> Iterator[SizedModule | Use]:
        """Yields the parameters and sharded modules that the module's forward uses, in the order of their
        registration."""
        for name, _ in own_parameters(module):
            if (module, name) in uses:
                yield uses[module, name]
        for child in module.children():
            state = state_of(child)
            if state is None:
                yield from self._body(child, uses)
            else:
                yield self._module(state, is_root=False)


def _plan_of(root: ShardState, states: list[ShardState], network: TransferCost | None) -> TransferPlan:
    context = root.context
    if network is None and context is not None and context.root is root and context.states == states:
        context.make_plan()
        return context.plan
    in_buckets = {group for group in root.groups if buckets_of(root.modules, group)}
    return plan_transfers(states, lambda _: (network, network), in_buckets)


def _states_below(root: ShardState) -> list[ShardState]:
    return [state for state in map(state_of, root.module.modules()) if state is not None]


def _is_trained(param: ShardedParam) -> bool:
    return param.sharded.requires_grad and math.prod(param.shape) > 0


def _param_sizes(group: ParamGroup, param: ShardedParam, *, is_in_place: bool) -> ParamSizes:
    plan = plan_flat([param.front_shape], group.sharding.num_shards)
    return ParamSizes.of(
        math.prod(param.shape),
        plan.shard_numel * plan.num_shards,
        plan.num_shards,
        (param.orig_dtype.itemsize, group.compute_dtype.itemsize, group.reduce_dtype.itemsize),
        is_in_place=is_in_place,
        is_trained=_is_trained(param),
        num_uses=len(param.owners),
    )


def _group_sizes(group: ParamGroup, params: dict[ShardedParam, ParamSizes]) -> GroupSizes:
    plan = plan_flat([param.front_shape for param in params], group.sharding.num_shards)
    dtype, num_shards = group.compute_dtype, group.sharding.num_shards
    is_cast = dtype != group.params[0].orig_dtype
    sent_bytes, whole_bytes = (
        plan.shard_numel * dtype.itemsize,
        unsharded_offsets(group.params, plan, dtype)[1] * dtype.itemsize,
    )
    cast_bytes = sent_bytes * is_cast
    if isinstance(group, ExtensionGroup):
        sent_bytes = group.given_bytes()
        # The input is packed, and the result unpacked.
        cast_bytes, whole_bytes = 2 * sent_bytes, num_shards * sent_bytes
    return GroupSizes(
        params=tuple(params.values()),
        shard_bytes=plan.shard_numel * group.params[0].orig_dtype.itemsize,
        sent_bytes=sent_bytes,
        whole_bytes=whole_bytes,
        num_shards=num_shards,
        num_replicas=group.sharding.num_replicas,
        cast_bytes=cast_bytes,
        is_offloaded=group.is_offloaded,
        gathered_as=group.gather_dtype,
        may_be_in_place=group.is_gathered_in_place,
        reduces_as=group.reduces_as,
        is_of_bytes=isinstance(group, ExtensionGroup),
    )
