"""The parameters that are gathered and reduced together: those of one `fully_shard` call that share a dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from disttrain.errors import ShardingError
from disttrain.fsdp2._torch import base_of
from disttrain.fsdp2.collectives import (
    Averaging,
    Gather,
    Hook,
    Reduction,
    ReductionPlan,
    start_gather,
    start_gather_in_place,
    start_reduction,
)
from disttrain.fsdp2.early import EarlyParts, parts_by_child
from disttrain.fsdp2.flat import FlatPlan, plan_flat
from disttrain.fsdp2.param import ShardedParam
from disttrain.fsdp2.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from disttrain.fsdp2.sharding import Sharding
from disttrain.fsdp2.streams import CommStreams
from disttrain.fsdp2.wholes import Wholes


class Comm:
    """What all groups of one model share: streams, and the buffers that a stream may still be reading."""

    def __init__(self, device: torch.device) -> None:
        self.streams = CommStreams(device)
        self.copied_out: tuple[torch.Tensor, torch.cuda.Event | None] | None = None
        self.reducing: UnderWay | None = None
        self.ready: torch.Event | None = None
        """What the next gather waits for, in place of everything on the current stream."""
        self.offloaded: torch.cuda.Event | None = None
        """Gradients are on their way to the host until then."""

    def release_gathered(self) -> None:
        """Let go of the last gathered buffer, once the all-gather stream knows that it has been copied out."""
        if self.copied_out is not None:
            with self.streams.gathering():
                self.streams.follow(self.copied_out[1])
            self.copied_out = None

    def drop_reduction(self) -> None:
        """Wait for the reduce-scatter under way, if any, and forget what it brings."""
        if self.reducing is not None:
            under_way, self.reducing = self.reducing, None
            under_way.reduction.wait(self.streams)

    def finish_offload(self) -> None:
        """Wait, on the host, until all gradients that go there have come."""
        if self.offloaded is not None:
            self.offloaded.synchronize()
            self.offloaded = None

    def finish_reduction(self) -> None:
        """Hand the gradients of the reduce-scatter under way, if any, to their parameters."""
        if self.reducing is not None:
            under_way, self.reducing = self.reducing, None
            under_way.group.take_reduced(under_way)


@dataclass(frozen=True)
class UnderWay:
    """A reduction of some of a group's parameters; `receivers` of its parts are None for those that had no gradient."""

    group: ParamGroup
    reduction: Reduction
    plan: FlatPlan
    params: tuple[ShardedParam, ...]
    receivers: list[ShardedParam | None]


class ParamGroup:
    """Gathers its parameters before they are needed, frees them after, reduces their gradients.

    Sharded values of all parameters lie in one flat buffer, so gathering copies nothing in, or casts once.
    """

    def __init__(
        self,
        params: list[ShardedParam],
        sharding: Sharding,
        policy: MixedPrecisionPolicy,
        offload: OffloadPolicy,
        device: torch.device,
    ) -> None:
        self.params = params
        self.comm: Comm | None = None
        self.sharding = sharding
        self.reduces_over_replicas = True
        self.reduces_unused = False
        self.only_sums = False
        self.divide_factor: float | None = None
        self.hook: Hook | None = None
        self.hook_stream: torch.cuda.Stream | None = None
        self.is_unsharded = False
        self._policy = policy
        self._offload = offload
        self._device = device
        self._orig_dtype = params[0].orig_dtype
        self._plan = plan_flat([param.front_shape for param in params], sharding.num_shards)
        self._is_cut_in_front = all(param.dim == 0 for param in params)
        self._wholes: Wholes | None = None
        self._flat: torch.Tensor | None = None
        self._kept: tuple[torch.Tensor, int] | None = None
        """Between forward and backward: the flat buffers of as many shards as ranks share the whole, and those ranks'
        number."""
        self._gather: Gather | None = None
        self._unreduced: dict[tuple[ShardedParam, ...], torch.Tensor] = {}
        """Averages over the shards' ranks of backward passes that were not reduced over the replicas."""
        self._early: EarlyParts | None = None
        self._reduced: set[ShardedParam] = set()
        """Those that this backward pass has reduced already."""
        self.lay_out()

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the gathered parameters."""
        return self._policy.param_dtype or self._orig_dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which gradients are reduced."""
        return self._policy.reduce_dtype or self.compute_dtype

    @property
    def is_offloaded(self) -> bool:
        """True where shards and their gradients are kept on the host."""
        return isinstance(self._offload, CPUOffloadPolicy)

    def __getstate__(self) -> dict[str, object]:
        """What a deep copy takes over; it brings its shards into a buffer of its own when it is first gathered."""
        gone = dict.fromkeys(("comm", "_wholes", "_flat", "_gather", "_kept", "_early"))
        return {**self.__dict__, **gone, "is_unsharded": False, "_unreduced": {}, "_reduced": set()}

    def lay_out(self) -> None:
        """Bring the local parts of all parameters into one flat buffer, and make them views of it."""
        if self._flat is not None and all(param.is_laid_out() for param in self.params):
            return
        for param in self.params:
            param.adopt_registered()
        self._orig_dtype = self._common_dtype()
        locals_ = [param.sharded._local_tensor for param in self.params]  # type: ignore[attr-defined]
        # Parameters outlive an inference; what is made in inference mode could not be trained.
        with torch.inference_mode(False), torch.no_grad():
            flat = self._new_flat(self._shard_device(locals_[0]), self._orig_dtype)
            for param, local, slot in zip(self.params, locals_, self._plan.slots, strict=True):
                view = param.slot_view(flat, slot)
                view.copy_(local)
                param.lay_out(view)
        self._flat = flat

    def _shard_device(self, local: torch.Tensor) -> torch.device:
        return torch.device("cpu") if self.is_offloaded and local.device.type != "meta" else local.device

    def _new_flat(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        is_pinned = (
            isinstance(self._offload, CPUOffloadPolicy)
            and self._offload.pin_memory
            and device.type == "cpu"
            and self._device.type == "cuda"
        )
        return torch.zeros(self._plan.shard_numel, dtype=dtype, device=device, pin_memory=is_pinned)

    def _common_dtype(self) -> torch.dtype:
        dtypes = {param.orig_dtype: param.fqn for param in self.params}
        if len(dtypes) > 1:
            raise ShardingError(
                "fully_shard",
                f"parameters that are gathered together have become of different dtypes: {dtypes}.",
                "Convert all of them alike, or before fully_shard.",
                rank=self.sharding.mesh.get_rank(),
            )
        return next(iter(dtypes))

    def unshard(self) -> None:
        """Start gathering; nothing when the parameters are gathered, or being gathered, already. Collective.

        On CUDA it follows what is on the current stream now, or `Comm.ready`.
        """
        if self.is_unsharded or self._gather is not None:
            return
        self.lay_out()
        comm = self._comm()
        assert self._flat is not None
        ready, comm.ready = comm.ready, None
        dtype, group = self.compute_dtype, self.sharding.shard_group
        if comm.streams.is_cuda and self._kept is None and self._is_cut_in_front:
            places = self._allocated_wholes().places
            self._gather = start_gather_in_place(self._flat, dtype, self._plan, places, group, comm.streams, ready)
            return
        comm.release_gathered()
        shard = self._flat
        if self._kept is not None:
            shard, num_ranks = self._kept
            group = self.sharding.group_after_forward(num_ranks)
            self._kept = None
        num_shards = self.sharding.num_shards
        self._gather = start_gather(shard, dtype, self._device, num_shards, group, comm.streams, ready)

    def wait_for_unshard(self) -> None:
        """Have the modules compute with the gathered parameters."""
        if self._gather is None:
            return
        comm, gather = self._comm(), self._gather
        self._gather = None
        gather.wait(comm.streams)
        if gather.output is not None:
            with torch.inference_mode(False), torch.no_grad():
                self._allocated_wholes().write(gather.output)
            # The buffer belongs to the all-gather stream: it must not be handed out again while it is being read here.
            comm.copied_out = (gather.output, comm.streams.mark())
        wholes = self._wholes
        assert wholes is not None
        for param, whole in zip(self.params, wholes.parameters, strict=True):
            if whole.requires_grad != param.sharded.requires_grad:
                whole.requires_grad_(param.sharded.requires_grad)
            param.show(whole)
        self.is_unsharded = True

    def _allocated_wholes(self) -> Wholes:
        """Memory for the gathered parameters; new tensors where what they are to be has changed."""
        wholes, dtype = self._wholes, self.compute_dtype
        if wholes is not None and wholes.dtype == dtype and wholes.device == self._device:
            wholes.allocate()
            return wholes
        wholes = self._wholes = Wholes(self.params, self._plan, dtype, self._device)
        for param, whole in zip(self.params, wholes.parameters, strict=True):
            param.unsharded = whole
        if self._early is not None:
            self._early.watch()
        return wholes

    def reshard(self, keep_on: int | None = None) -> None:
        """Free the gathered parameters; a gather that nobody has waited for is waited for first.

        `keep_on` that many neighbouring ranks: keep this rank's part of what they hold together, for the next gather.
        """
        self.wait_for_unshard()
        self._kept = None
        if not self.is_unsharded:
            return
        if keep_on is not None:
            self._kept = self._own_part(keep_on), keep_on
        for param in self.params:
            param.show(param.sharded)
        assert self._wholes is not None
        self._wholes.free()
        self.is_unsharded = False

    def _own_part(self, num_ranks: int) -> torch.Tensor:
        """The flat buffers of this rank's part of the gathered parameters, where `num_ranks` neighbours share them."""
        count = self.sharding.num_shards // num_ranks
        first = self.sharding.shard_rank % num_ranks * count
        assert self._wholes is not None
        with torch.inference_mode(False), torch.no_grad():
            return self._wholes.rows(first, count)

    def holds(self, tensor: torch.Tensor) -> bool:
        """True for a gathered parameter and views of it."""
        base = base_of(tensor)
        return any(param.unsharded is base for param in self.params)

    def drop_grads(self) -> None:
        """Forget whole gradients that have not been reduced, and those not reduced over the replicas."""
        self._unreduced.clear()
        self._reduced.clear()
        for param in self.params:
            if param.unsharded is not None:
                param.unsharded.grad = None

    def zero_grads(self, *, set_to_none: bool) -> None:
        """Clear whole gradients and those of the shards."""
        self.drop_grads()
        for param in self.params:
            if set_to_none or param.sharded.grad is None:
                param.sharded.grad = None
            else:
                param.sharded.grad = torch.zeros_like(param.sharded.grad)

    @property
    def is_trained(self) -> bool:
        """True once a parameter that gradients are asked for has been gathered."""
        return any(param.is_trained for param in self.params)

    def reduce_early(self, module: nn.Module, may_reduce: Callable[[], bool]) -> None:
        """Reduce the gradients of each of the root `module`'s large children when they are there, if `may_reduce`."""
        parts = parts_by_child(module, self.params)
        if len(parts) < 2 or self._early is not None:
            return

        def reduce(part: Sequence[ShardedParam]) -> None:
            if may_reduce() and not self.reduces_unused:
                self._reduced.update(part)
                self._reduce(part)

        self._early = EarlyParts(parts, reduce)
        if self._wholes is not None:
            self._early.watch()

    def begin_backward(self) -> None:
        """A backward pass begins: no gradient of it has been reduced."""
        self._reduced.clear()
        if self._early is not None:
            self._early.begin()

    def reduce_grads(self) -> None:
        """Reduce the gradients of this backward pass that have not been. Collective."""
        rest = [param for param in self.params if param not in self._reduced] if self._reduced else self.params
        self._reduced.clear()
        if any(param.has_grad for param in rest) or (self.reduces_unused and self.is_trained):
            self._reduce(rest)

    def _reduce(self, params: Sequence[ShardedParam]) -> None:
        """Start averaging the whole gradients over the ranks into the sharded parameters'. Collective.

        A trainable parameter without a gradient takes part with zeros, so that sizes agree on all ranks, but gets none.
        """
        comm = self._comm()
        # What has no elements has nothing to reduce.
        trainable = [param for param in params if param.is_trained]
        with torch.no_grad():
            grads = [param.whole_grad() for param in trainable]
        receivers = [None if grad is None else param for param, grad in zip(trainable, grads, strict=True)]
        for param in trainable:
            param.drop_grad()
        comm.finish_reduction()
        plan = self._plan
        if len(trainable) < len(self.params):
            plan = plan_flat([param.front_shape for param in trainable], self.sharding.num_shards)
        dtype = self.reduce_dtype
        num_ranks = self.sharding.num_shards * self.sharding.num_replicas
        factor = num_ranks if self.divide_factor is None and self.only_sums else self.divide_factor
        averaging = Averaging.over(num_ranks, dtype, factor)
        what = ReductionPlan(self.sharding, averaging, self.reduces_over_replicas, self.hook, self.hook_stream)
        unreduced = self._unreduced.pop(tuple(trainable), None)
        with torch.no_grad():
            packed = [
                torch.zeros(slot.shape, dtype=self.compute_dtype, device=self._device) if grad is None else grad
                for grad, slot in zip(grads, plan.slots, strict=True)
            ]
            reduction = start_reduction(packed, plan, dtype, what, unreduced, comm.streams)
        comm.reducing = UnderWay(self, reduction, plan, tuple(trainable), receivers)

    def take_reduced(self, done: UnderWay) -> None:
        """Order the current stream after a reduction of this group, and give each receiver its gradient."""
        comm = self._comm()
        done.reduction.wait(comm.streams)
        if not self.reduces_over_replicas and self.sharding.replicate_group is not None:
            self._unreduced[done.params] = done.reduction.output
            return
        with torch.no_grad():
            flat = done.reduction.output.to(self._orig_dtype)
            if self.is_offloaded:
                flat = self._offloaded(flat, done.receivers, comm)
            for param, slot in zip(done.receivers, done.plan.slots, strict=True):
                if param is not None:
                    param.accumulate_grad(param.slot_view(flat, slot))

    def _offloaded(self, flat: torch.Tensor, receivers: Sequence[ShardedParam | None], comm: Comm) -> torch.Tensor:
        """The reduced gradients on the host; where they are added to earlier ones, once they are there."""
        on_host = torch.empty(
            flat.numel(), dtype=flat.dtype, pin_memory=self._flat is not None and self._flat.is_pinned()
        )
        on_host.copy_(flat, non_blocking=True)
        comm.offloaded = comm.streams.mark()
        if any(param is not None and param.sharded.grad is not None for param in receivers):
            comm.finish_offload()
        return on_host

    def _comm(self) -> Comm:
        """The model's shared buffers; a group that is used before the model's first forward gets its own."""
        if self.comm is None:
            self.comm = Comm(self._device)
        return self.comm
