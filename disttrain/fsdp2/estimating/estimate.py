"""Estimates what training a sharded model costs each rank, before it runs: bytes held, and bytes sent in a step."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from disttrain.dtensor import DTensor, Placement
from disttrain.errors import ShardingError
from disttrain.fsdp2.estimating.rehearsal import Rehearsal
from disttrain.fsdp2.estimating.sizes import (
    Held,
    OptimizerBytes,
    OptimizerCost,
    Sizing,
    held_of_group,
    held_unsharded,
)
from disttrain.fsdp2.estimating.values import REDUCED, Message, Peak
from disttrain.fsdp2.policies import MixedPrecisionPolicy, OffloadPolicy, TransferPolicy
from disttrain.fsdp2.shard_module import fully_shard
from disttrain.fsdp2.state import ShardState, state_of
from disttrain.fsdp2.transfers.forms import TransferCost
from disttrain.fsdp2.transfers.planning import TransferPlan
from disttrain.mesh import DeviceMesh


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in a step: the number of ranks, the number of calls, the bytes that each rank sends in
    all of them, and the number of collectives. A call that gathers parameters directly into their places has one
    collective for each."""

    operation: str
    num_ranks: int
    num_calls: int
    sent_bytes: int
    num_collectives: int


@dataclass(frozen=True)
class Estimate:
    """Bytes that the first rank, which has the most, holds, and what it sends in a step. Printed, it is a table."""

    mesh_text: str
    parameters_bytes: int
    """Shards with their padding, and parameters that are not sharded."""
    gradients_bytes: int
    optimizer_bytes: int
    buffers_bytes: int
    host_bytes: int
    """The bytes of parameters, gradients and optimizer state that an offload policy keeps in the host's memory."""
    resting_bytes: int
    """The bytes that the device holds all the time: parameters, optimizer state, buffers."""
    peak: Peak
    """Temporary memory at its peak, without activations and an optimizer's intermediate results."""
    traffic: tuple[Traffic, ...]
    transfers_text: str
    """The form in which parameters and gradients are sent, and how many modules are sent together."""

    @property
    def unsharded_peak_bytes(self) -> int:
        """Unsharded parameters and gradients at the peak, with what is packed and gathered for that."""
        return self.peak.num_bytes - self.peak.by_kind.get(REDUCED, 0)

    @property
    def peak_bytes(self) -> int:
        """The most that the device holds at one time, without activations."""
        return self.resting_bytes + self.peak.num_bytes

    @property
    def wire_bytes(self) -> int:
        """Bytes that a rank sends in a step."""
        return sum(each.sent_bytes for each in self.traffic)

    def __str__(self) -> str:
        rows: list[tuple[str, str, int]] = [
            ("parameters", "", self.parameters_bytes),
            ("gradients", "", self.gradients_bytes),
            ("optimizer state", "", self.optimizer_bytes),
            ("buffers", "", self.buffers_bytes),
        ]
        if self.host_bytes:
            rows.append(("  of these on the host", "", self.host_bytes))
        rows.append(("peak, without activations", "", self.peak_bytes))
        rows += [(f"  {kind}", "", size) for kind, size in self.peak.by_kind.items() if size]
        num_calls, num_collectives = (
            sum(each.num_calls for each in self.traffic),
            sum(each.num_collectives for each in self.traffic),
        )
        rows.append(("sent in a step", _counts(num_calls, num_collectives), self.wire_bytes))
        rows += [
            (
                f"  {each.operation} of {each.num_ranks} ranks",
                _counts(each.num_calls, each.num_collectives),
                each.sent_bytes,
            )
            for each in self.traffic
        ]
        lines = [f"{name:<40} {counts:>17} {_readable(size):>12}" for name, counts, size in rows]
        title = f"on {self.mesh_text}, each rank; the peak is in {self.peak.when}"
        header = f"{'':<40} {_counts('calls', 'collectives'):>17} {'bytes':>12}"
        return "\n".join((title, header, *lines, self.transfers_text))


def _counts(num_calls: object, num_collectives: object) -> str:
    return f"{num_calls!s:>5} {num_collectives!s:>11}"


def estimate(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    blocks: Iterable[nn.Module] = (),
    optimizer: OptimizerCost = torch.optim.AdamW,
    num_microbatches: int = 1,
    reduces_each: bool = True,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Placement | None] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    transfer_policy: TransferPolicy | None = None,
    network: TransferCost | None = None,
) -> Estimate:
    """Say what a step of training `model` under `fully_shard` takes: bytes held, also at the peak, and bytes sent.

    A model that has been sharded is taken as it is. Of one that has not been, the cost is that of calling fully_shard
    with these arguments on each of `blocks`, then on the model, which stays as it is. It may be on "meta".

    Args:    optimizer         its class, or a function from parameters to one, which is tried on a parameter of
                               64 x 64; or the bytes that it keeps for each element.
             num_microbatches  forwards and backwards in a step.
             reduces_each      False: only the last one's backward reduces gradients (set_requires_gradient_sync).
             network           what a gather costs where ranks are on several hosts, such as TransferCost(30e-6, 2e10);
                               None: they are on one, or a model that has run has found out.
    The step is not the first one, which has yet to learn the order of the modules, and begins without gradients.
    Modules are taken to run in the order in which they are registered. Parameters with methods around the gather are
    asked what is gathered of them, on a shard without memory; weights in float8 are gathered so. What kernels take for
    themselves is left out, as activations are. Bytes sent are those of collectives that go round a ring.
    Raises:  ShardingError for a model that is sharded only in parts, or otherwise than these arguments say.
    Communicates nothing.
    """
    options = {
        "reshard_after_forward": reshard_after_forward,
        "shard_placement_fn": shard_placement_fn,
        "mp_policy": mp_policy,
        "offload_policy": offload_policy,
        "transfer_policy": transfer_policy,
    }
    blocks = list(blocks)
    root = state_of(model)
    if root is None:
        root = state_of(_sharded_copy(model, mesh, blocks, options))
        assert root is not None
    else:
        _check_is_sharded_so(root, mesh, blocks, options)
    sizing = Sizing(root, network)
    step = Rehearsal(sizing.root, sizing.bundles, has_streams=root.device.type == "cuda")
    step.run(num_microbatches, reduces_each=reduces_each)
    return _summed_up(root, sizing, step, OptimizerBytes(optimizer))


def _check_is_sharded_so(
    root: ShardState, mesh: DeviceMesh | None, blocks: list[nn.Module], options: dict[str, Any]
) -> None:
    options_set = [name for name, value in options.items() if value is not None] + ["blocks"] * bool(blocks)
    if mesh is not None and any(mesh != group.sharding.mesh for group in root.groups if group.sharding.num_summed == 1):
        options_set.append("mesh")
    if options_set:
        raise ShardingError(
            "estimate",
            f"the model is sharded already, and {', '.join(options_set)} would say how it is to be.",
            "Leave them out, or give the model before fully_shard.",
        )


def _sharded_copy(
    model: nn.Module, mesh: DeviceMesh | None, blocks: list[nn.Module], options: dict[str, Any]
) -> nn.Module:
    """A copy of the model without memory, sharded as asked."""
    if any(state_of(module) is not None for module in model.modules()):
        raise ShardingError(
            "estimate", "parts of the model are sharded, but not the model itself.", "Call fully_shard on it first."
        )
    tensors = [*model.parameters(), *model.buffers()]
    # deepcopy takes what it finds here as already copied.
    memo: dict[int, Any] = {id(tensor): _without_memory(tensor) for tensor in tensors}
    copied = copy.deepcopy(model, memo)
    for block in blocks:
        if id(block) not in memo:
            raise ShardingError(
                "estimate", f"a {type(block).__name__} of the blocks is no part of the model.", "Give parts of it."
            )
        fully_shard(memo[id(block)], mesh=mesh, **options)
    return fully_shard(copied, mesh=mesh, **options)


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        local = torch.empty_like(tensor._local_tensor, device="meta")
        bare: torch.Tensor = DTensor(local, tensor._spec)
    else:
        bare = torch.empty_like(tensor, device="meta")
    return nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare


def _summed_up(root: ShardState, sizing: Sizing, step: Rehearsal, optimizer: OptimizerBytes) -> Estimate:
    total, on_host = Held(), Held()
    for group in sizing.groups:
        of_group = held_of_group(group, optimizer)
        total += of_group
        if group.is_offloaded and root.device.type != "cpu":
            on_host += of_group
    unsharded = held_unsharded(root, sizing.groups, optimizer)
    total += unsharded
    buffers_bytes = sum(buffer.nbytes for buffer in root.module.buffers())
    meshes = [group.sharding.mesh for group in sizing.groups]
    by_kind = {**step.peak.by_kind, REDUCED: step.peak.by_kind.get(REDUCED, 0) + unsharded.gradients}
    return Estimate(
        mesh_text=str(max(meshes, key=DeviceMesh.size).layout) if meshes else "no mesh",
        parameters_bytes=total.parameters,
        gradients_bytes=total.gradients,
        optimizer_bytes=total.optimizer,
        buffers_bytes=buffers_bytes,
        host_bytes=on_host.parameters + on_host.gradients + on_host.optimizer,
        resting_bytes=total.parameters + total.optimizer + buffers_bytes - on_host.parameters - on_host.optimizer,
        peak=Peak(step.peak.when, by_kind),
        traffic=_traffic(sum(step.messages, Counter())),
        transfers_text=_in_words(sizing.plan),
    )


def _traffic(messages: Counter[Message]) -> tuple[Traffic, ...]:
    by_kind: dict[tuple[str, int], Traffic] = {}
    for message, count in messages.items():
        kind = message.operation, message.num_ranks
        old = by_kind.get(kind, Traffic(*kind, 0, 0, 0))
        by_kind[kind] = Traffic(
            *kind,
            old.num_calls + count,
            old.sent_bytes + count * message.sent_bytes,
            old.num_collectives + count * message.num_collectives,
        )
    return tuple(by_kind[kind] for kind in sorted(by_kind))


def _in_words(plan: TransferPlan) -> str:
    joint = {group: each for each in plan.sets for group in each.groups if each.gathers}
    kinds = Counter(
        "flat" if not any(mask) else "in place" if all(mask) else "mixed" for mask in plan.in_place.values()
    )
    forms = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
    sizes = sorted({len(each.states) for each in joint.values()})
    together = f"; gathered together: {' or '.join(map(str, sizes))} modules" if sizes and sizes[-1] > 1 else ""
    apart = "; reductions by a communicator of their own" if plan.apart else ""
    return f"groups of parameters by form: {forms}{together}{apart}"


def _readable(num_bytes: int) -> str:
    size, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.2f} {units[0]}"
