"""The parameters that are gathered and reduced together: those of one `fully_shard` call that share a dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from disttrain.fsdp2._torch import base_of, out_of_inference
from disttrain.fsdp2.checks import common_dtype, refuse_device
from disttrain.fsdp2.collectives import (
    Averaging,
    Gather,
    Hook,
    ReductionPlan,
    start_gather,
    start_gather_in_place,
    start_reduction,
)
from disttrain.fsdp2.comm import Comm, UnderWay
from disttrain.fsdp2.early import EarlyParts, parts_by_child
from disttrain.fsdp2.flat import FlatPlan, plan_flat
from disttrain.fsdp2.param import LaidOut, ShardedParam
from disttrain.fsdp2.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from disttrain.fsdp2.reduced_grads import hand_out, to_host
from disttrain.fsdp2.rounded import RoundedShards, latest
from disttrain.fsdp2.scheduled import GradSums
from disttrain.fsdp2.sharding import Sharding
from disttrain.fsdp2.shown import Place, Shown
from disttrain.fsdp2.stale_graphs import versions
from disttrain.fsdp2.wholes import Wholes


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
        self.module_path = ""
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
        self.plan = plan_flat([param.front_shape for param in params], sharding.num_shards)
        self._is_cut_in_front = all(param.dim == 0 for param in params)
        self._wholes: Wholes | None = None
        self._flat: torch.Tensor | None = None
        self._laid_out: LaidOut | None = None
        self.rounded: RoundedShards | None = None
        self._kept: tuple[torch.Tensor, int] | None = None
        """Between forward and backward: the flat buffers of as many shards as ranks share the whole, and those ranks'
        number."""
        self._gather: Gather | None = None
        self.gathered: tuple[int, ...] = ()
        """Which versions of the shards."""
        self._unreduced: dict[ShardedParam, torch.Tensor] = {}
        """Parts of flat buffers: averages over the shards' ranks alone, which are still to be reduced over replicas."""
        self._early: EarlyParts | None = None
        self.grad_sums: GradSums | None = None
        self._reduced: set[ShardedParam] = set()
        """Those that this backward pass has reduced already."""
        self._has_taken_part = False
        self.shown = Shown(params)
        self._is_misplaced = False
        self.lay_out()

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the gathered parameters."""
        return self._chosen(self._policy.param_dtype) or self._orig_dtype

    def _chosen(self, dtype: torch.dtype | None) -> torch.dtype | None:
        """What the policy says of floating-point values; others keep their dtype."""
        return dtype if self._orig_dtype.is_floating_point else None

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which gradients are reduced."""
        return self._chosen(self._policy.reduce_dtype) or self.compute_dtype

    @property
    def is_offloaded(self) -> bool:
        """True where shards and their gradients are kept on the host."""
        return isinstance(self._offload, CPUOffloadPolicy)

    @property
    def flat_to_round(self) -> torch.Tensor | None:
        """The flat buffer, in fp32, where each gather would round it."""
        is_rounded = self._orig_dtype == torch.float32 != self.compute_dtype
        return None if self.is_offloaded or not is_rounded or self._is_misplaced else self._flat

    def __getstate__(self) -> dict[str, object]:
        """What a deep copy takes over; it brings its shards into a buffer of its own when it is first gathered."""
        gone = ("comm", "_wholes", "_flat", "_laid_out", "_gather", "_kept", "_early", "grad_sums", "rounded")
        return {**self.__dict__, **dict.fromkeys(gone), "is_unsharded": False, "_unreduced": {}, "_reduced": set()}

    def lay_out(self) -> None:
        """Bring the local parts of all parameters into one flat buffer, and make them views of it."""
        if self._laid_out is not None and self._laid_out.holds():
            return
        for param in self.params:
            param.adopt_registered()
        if self._laid_out is not None and all(param.is_in_place() for param in self.params):
            return
        self._orig_dtype = common_dtype(self.params, self.sharding.mesh.get_rank())
        locals_ = [param.sharded._local_tensor for param in self.params]  # type: ignore[attr-defined]
        # Parameters outlive an inference; what is made in inference mode could not be trained.
        with torch.inference_mode(False), torch.no_grad():
            flat = self._new_flat(self._shard_device(locals_[0]), self._orig_dtype)
            for param, local, slot in zip(self.params, locals_, self.plan.slots, strict=True):
                view = param.slot_view(flat, slot)
                view.copy_(local)
                param.lay_out(view)
        self._flat, self._laid_out = flat, LaidOut(self.params)
        self.shown.forget()
        self._is_misplaced = flat.is_meta or (flat.device != self._device and not self.is_offloaded)

    def _shard_device(self, local: torch.Tensor) -> torch.device:
        return torch.device("cpu") if self.is_offloaded and local.device.type != "meta" else local.device

    def _new_flat(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        is_pinned = (
            isinstance(self._offload, CPUOffloadPolicy)
            and self._offload.pin_memory
            and device.type == "cpu"
            and self._device.type == "cuda"
        )
        return torch.zeros(self.plan.shard_numel, dtype=dtype, device=device, pin_memory=is_pinned)

    def unshard(self) -> None:
        """Start gathering; nothing when the parameters are gathered, or being gathered, already. Collective.

        On CUDA it follows what is on the current stream now, or `Comm.ready`.
        """
        if self.is_unsharded or self._gather is not None:
            return
        self.lay_out()
        assert self._flat is not None
        if self._is_misplaced:
            refuse_device(self.params[0], self._flat.device, self._device, self.sharding.mesh.get_rank())
        if self._kept is None:
            self.gathered = versions(self.params, self._flat)
        comm = self._comm()
        ready, comm.ready = comm.ready, None
        dtype, group = self.compute_dtype, self.sharding.shard_group
        shard = latest(self, self._flat)
        if comm.streams.is_cuda and ready is None and self._kept is None and self._is_cut_in_front:
            places = self._allocated_wholes().places
            self._gather = start_gather_in_place(shard, dtype, self.plan, places, group, comm.streams)
            self._note_upload(comm)
            return
        comm.release_gathered()
        if self._kept is not None:
            shard, num_ranks = self._kept
            group = self.sharding.group_after_forward(num_ranks)
            self._kept = None
        self._gather = start_gather(shard, dtype, self._device, self.sharding.num_shards, group, comm.streams, ready)
        self._note_upload(comm)

    def _note_upload(self, comm: Comm) -> None:
        if isinstance(self._offload, CPUOffloadPolicy) and self._gather is not None:
            comm.uploaded = self._gather.done

    def wait_for_unshard(self) -> None:
        """Order the current stream (CPU: the host) after the gather."""
        if self._gather is None:
            return
        comm, gather = self._comm(), self._gather
        self._gather = None
        gather.wait(comm.streams)
        if gather.output is not None:
            with out_of_inference(), torch.no_grad():
                self._allocated_wholes().write(gather.output)
            # The buffer belongs to the all-gather stream: it must not be handed out again while it is being read here.
            comm.copied_out = (gather.output, comm.streams.mark())
        self.is_unsharded = True

    def show(self) -> list[Place]:
        """Have the modules compute with the gathered parameters, if they are gathered. Returns the places where a
        module has something else than the shard, and keeps that."""
        if self.shown.is_whole or not self.is_unsharded:
            return []
        assert self._wholes is not None
        others = self.shown.show(self._wholes.parameters)
        if self.grad_sums is not None:
            self.grad_sums.watch()
        return others

    def hide(self) -> None:
        """Let modules, and whoever asks them, have the shards; the gathered parameters keep their memory."""
        if self.shown.is_whole:
            self.shown.hide()

    def _allocated_wholes(self) -> Wholes:
        """Memory for the gathered parameters; new tensors where what they are to be has changed."""
        wholes, dtype = self._wholes, self.compute_dtype
        if wholes is not None and wholes.dtype == dtype and wholes.device == self._device:
            wholes.allocate()
            return wholes
        wholes = self._wholes = Wholes(self.params, self.plan, dtype, self._device)
        self.shown.forget()
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
        self.hide()
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
        self._has_taken_part = False
        for param in self.params:
            param.drop_grad()

    def zero_grads(self, *, set_to_none: bool) -> None:
        """Clear whole gradients and those of the shards."""
        if self.comm is not None:
            self.comm.drop_reductions(self)
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

    def keep_grads(self) -> None:
        """Keep the gradients of this backward pass for one that reduces, in the dtype in which they will be reduced."""
        if self.reduce_dtype != self.compute_dtype:
            for param in self.params:
                param.keep_grad(self.reduce_dtype)

    def sum_grads_as_they_come(self) -> None:
        """Do so with each gradient, for a schedule that reduces the sum of many."""
        if self.reduce_dtype != self.compute_dtype:
            self.grad_sums = GradSums(self.params, self.reduce_dtype)

    def reduce_grads(self, *, at_end: bool) -> None:
        """Reduce the gradients of this backward pass, or what is there of them, that have not been. Collective."""
        reduced, rest = self._reduced, self.params
        if reduced:
            rest = [param for param in self.params if param not in reduced or param.has_grad]
            self._reduced = set()
        is_owed = bool(self._unreduced) and self.reduces_over_replicas
        takes_part = self.reduces_unused and self.is_trained and not (at_end and self._has_taken_part)
        self._has_taken_part = not at_end
        if is_owed or takes_part or any(param.has_grad for param in rest):
            self._reduce(rest)

    def reduce_all(self, scale: float) -> None:
        """Start to reduce, and multiply by `scale`, what backward passes have left of all trained parameters, and wait
        for no reduction under way. All of them receive a gradient, also where this rank has none. Collective."""
        if any(param.is_trained or param in self._unreduced for param in self.params):
            self._reduce(self.params, scale)

    def _reduce(self, params: Sequence[ShardedParam], scale: float | None = None) -> None:
        """Start averaging the whole gradients over the ranks into the sharded parameters'. Collective.

        A trainable parameter without a gradient takes part with zeros, so that sizes agree on all ranks; it gets none
        unless `reduces_unused`, or a schedule reduces, which gives `scale`.
        """
        comm = self._comm()
        trainable = [param for param in params if param.is_trained or param in self._unreduced]
        with torch.no_grad():
            grads = [param.whole_grad() for param in trainable]
        all_receive = self.reduces_unused or scale is not None
        receivers = [
            param if grad is not None or all_receive or param in self._unreduced else None
            for param, grad in zip(trainable, grads, strict=True)
        ]
        for param in trainable:
            param.drop_grad()
        if scale is None:
            comm.finish_reductions()
        plan = self.plan
        if len(trainable) < len(self.params):
            plan = plan_flat([param.front_shape for param in trainable], self.sharding.num_shards)
        dtype = self.reduce_dtype
        num_ranks = self.sharding.num_shards * self.sharding.num_replicas
        factor = num_ranks if self.divide_factor is None and self.only_sums else self.divide_factor
        averaging = Averaging.over(num_ranks, dtype, factor, 1.0 if scale is None else scale)
        what = ReductionPlan(self.sharding, averaging, self.reduces_over_replicas, self.hook, self.hook_stream)
        with torch.no_grad():
            unreduced = self._unreduced_of(trainable, plan) if self._unreduced else None
            packed = [
                torch.zeros(slot.shape, dtype=self.compute_dtype, device=self._device) if grad is None else grad
                for grad, slot in zip(grads, plan.slots, strict=True)
            ]
            if len({grad.dtype for grad in packed}) > 1:
                packed = [grad.to(dtype) for grad in packed]
            reduction = start_reduction(packed, plan, dtype, what, unreduced, comm.streams)
        is_complete = self.reduces_over_replicas or self.sharding.replicate_group is None
        comm.reducing.append(UnderWay(self, reduction, plan, receivers, is_complete))

    def _unreduced_of(self, params: Sequence[ShardedParam], plan: FlatPlan) -> torch.Tensor | None:
        """What earlier backward passes have left to be reduced over the replicas, laid out by `plan`."""
        parts = [self._unreduced.pop(param, None) for param in params]
        given = next((part for part in parts if part is not None), None)
        if given is None:
            return None
        sizes = plan.split_sizes
        return torch.cat([given.new_zeros(s) if part is None else part for part, s in zip(parts, sizes, strict=True)])

    def take_reduced(self, done: UnderWay) -> None:
        """Order the current stream after a reduction of this group, give each receiver its gradient, call its hooks."""
        comm = self._comm()
        done.reduction.wait(comm.streams)
        if not done.is_complete:
            parts = done.reduction.output.split(done.plan.split_sizes)
            self._unreduced.update(
                (param, part) for param, part in zip(done.receivers, parts, strict=True) if param is not None
            )
            return
        with torch.no_grad():
            flat = done.reduction.output.to(self._orig_dtype)
            if self.is_offloaded:
                is_pinned = self._flat is not None and self._flat.is_pinned()
                flat = to_host(flat, done.receivers, comm, is_pinned=is_pinned)
            hand_out(flat, done.receivers, done.plan.slots)

    def _comm(self) -> Comm:
        """The model's shared buffers; a group that is used before the model's first forward gets its own."""
        if self.comm is None:
            self.comm = Comm(self._device)
        return self.comm
