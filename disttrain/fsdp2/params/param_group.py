"""The parameters that are gathered and reduced together: those of one `fully_shard` call that share a dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import repeat
from typing import Protocol
from weakref import ref

import torch

from disttrain.dtensor.local_part import local_part
from disttrain.fsdp2._torch import (
    are_same,
    base_of,
    call_when_added,
    drop_gradients,
    gradients_of,
    out_of_grad,
    plain_gradients,
)
from disttrain.fsdp2.faults.checks import common_dtype, refuse_device, refuse_parts_on_meta
from disttrain.fsdp2.grads.reduced import hand_out, parts_of, to_host
from disttrain.fsdp2.grads.sums import GradSums
from disttrain.fsdp2.machine.group import Group, post_forward_mesh_size
from disttrain.fsdp2.modules.parameter_swap import ForeignTensor, Shown
from disttrain.fsdp2.params.cast_shards import CastShards, latest
from disttrain.fsdp2.params.flat import plan_flat
from disttrain.fsdp2.params.param import LaidOut, ShardedParam, have_earlier_grads, versions
from disttrain.fsdp2.params.sharding import Sharding
from disttrain.fsdp2.params.unsharded import UnshardedParams
from disttrain.fsdp2.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from disttrain.fsdp2.transfers.collectives import Hook, ReductionPlan
from disttrain.fsdp2.transfers.comm import Comm, UnderWay
from disttrain.process_group import ProcessGroup


class Pending(Protocol):
    """Something that brings values, such as a gather."""

    def finish(self) -> None:
        """Makes the current stream (on CPU: the host) wait for it."""


class ParamGroup:
    """The memory of some parameters: their shards, the gathered parameters, and gradients. `state` decides what happens
    with it.

    Sharded values of all parameters lie in one flat buffer, so gathering copies nothing in, or casts once.
    """

    keeps_part = True
    """This rank's part of what few ranks hold together may be kept between forward and backward."""

    def __init__(
        self,
        params: list[ShardedParam],
        sharding: Sharding,
        policy: MixedPrecisionPolicy,
        offload: OffloadPolicy,
        device: torch.device,
    ) -> None:
        self.params = params
        self.state = Group(self, keeps_part=self.keeps_part)
        self.comm: Comm | None = None
        self.module_path = ""
        self.sharding = sharding
        self.only_sums = False
        self.divide_factor: float | None = None
        self.hook: Hook | None = None
        self.hook_stream: torch.cuda.Stream | None = None
        self._policy = policy
        self._offload = offload
        self.device = device
        self._use_dtype(params[0].orig_dtype)
        self.plan = plan_flat([param.front_shape for param in params], sharding.num_shards)
        self._is_cut_in_front = all(param.dim == 0 for param in params)
        self.in_place: tuple[bool, ...] = (device.type == "cuda",) * len(params)
        """For each parameter, whether it is gathered directly into its place, and reduced from there."""
        self.reduced_apart: ProcessGroup | None = None
        """The shards' ranks once more, for reductions that do not wait for gathers."""
        self._unsharded: UnshardedParams | None = None
        self._flat: torch.Tensor | None = None
        self._laid_out: LaidOut | None = None
        self.planned_reduction: tuple[tuple[object, ...], ReductionPlan] | None = None
        """The plan of the last reduction, and what it follows from."""
        self.cast_shards: CastShards | None = None
        self._kept: tuple[torch.Tensor, int] | None = None
        """Between forward and backward: the flat buffers of as many shards as ranks share the whole, and those ranks'
        number."""
        self.gathering: Pending | None = None
        """The gather that brings its values, while it is in progress."""
        self.gathered: tuple[int, ...] = ()
        """The versions of the shards that were gathered."""
        self.unreduced: dict[ShardedParam, torch.Tensor] = {}
        """Parts of flat buffers: averages over the shards' ranks alone, which are still to be reduced over replicas."""
        self.gradient_is_ready: Callable[[int, ShardedParam], None] | None = None
        """To be called with a bucket's number, and a parameter in it."""
        self.grad_sums: GradSums | None = None
        self.shown = Shown(params)
        self._is_misplaced = False
        self.lay_out()

    def _use_dtype(self, dtype: torch.dtype) -> None:
        """The shards are of this dtype. The policy chooses others for floating-point values alone."""
        policy = self._policy if dtype.is_floating_point else MixedPrecisionPolicy()
        self._orig_dtype = dtype
        self.compute_dtype = policy.param_dtype or dtype
        """The dtype of the gathered parameters."""
        self.reduce_dtype = policy.reduce_dtype or self.compute_dtype
        """The dtype in which gradients are reduced."""

    @property
    def is_offloaded(self) -> bool:
        """True where shards and their gradients are kept on the host."""
        return isinstance(self._offload, CPUOffloadPolicy)

    @property
    def gather_dtype(self) -> torch.dtype:
        """The dtype of what is gathered."""
        return self.compute_dtype

    @property
    def sent_numel(self) -> int:
        """Elements of what a rank gives to a gather."""
        return self.plan.shard_numel

    @property
    def is_gathered_in_place(self) -> bool:
        """True where a transport can write what it gathers where it is used."""
        return self._is_cut_in_front

    @property
    def sends_shards(self) -> bool:
        """True where what is gathered has been there since the shards were last written to."""
        return True

    @property
    def reduces_as(self) -> tuple[object, ...]:
        """A value that is alike for groups whose reductions may be one."""
        factors = self.divide_factor, self.only_sums
        return self.reduce_dtype, self.state.reduces_over_replicas, self.hook, self.hook_stream, factors

    def reduction_group(self) -> ProcessGroup:
        """The ranks over which gradients are reduced."""
        return self.sharding.shard_group if self.reduced_apart is None else self.reduced_apart

    @property
    def flat_to_cast(self) -> torch.Tensor | None:
        """The flat buffer, in fp32, where each gather would round it."""
        is_cast = self._orig_dtype == torch.float32 != self.compute_dtype
        return None if self.is_offloaded or not is_cast or self._is_misplaced else self._flat

    def __getstate__(self) -> dict[str, object]:
        """The state of a deep copy; it brings its shards into a buffer of its own when it is first gathered."""
        gone = (
            "grad_sums",
            "cast_shards",
            "comm",
            "_unsharded",
            "_flat",
            "_laid_out",
            "planned_reduction",
            "gathering",
            "reduced_apart",
            "_kept",
        )
        return {**self.__dict__, **dict.fromkeys(gone), "gradient_is_ready": None, "unreduced": {}}

    def lay_out(self) -> None:
        """Bring the local parts of all parameters into one flat buffer, and make them views of it."""
        if self._laid_out is not None and self._laid_out.holds():
            return
        for param in self.params:
            param.adopt_registered()
        if self._laid_out is not None and all(param.is_in_place() for param in self.params):
            return
        self._use_dtype(common_dtype(self.params, self.sharding.mesh.get_rank()))
        refuse_parts_on_meta(self.params, self.device, self.sharding.mesh.get_rank())
        locals_ = [local_part(param.sharded) for param in self.params]
        # Parameters outlive an inference; what is made in inference mode could not be trained.
        with torch.inference_mode(False), torch.no_grad():
            flat = self._new_flat(self._shard_device(locals_[0]), self._orig_dtype)
            for param, local, slot in zip(self.params, locals_, self.plan.slots, strict=True):
                view = param.slot_view(flat, slot)
                view.copy_(local)
                param.lay_out(view)
        self._flat, self._laid_out = flat, LaidOut(self.params)
        self.shown.forget()
        self._is_misplaced = flat.is_meta or (flat.device != self.device and not self.is_offloaded)

    def _shard_device(self, local: torch.Tensor) -> torch.device:
        return torch.device("cpu") if self.is_offloaded and local.device.type != "meta" else local.device

    def _new_flat(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        is_pinned = (
            isinstance(self._offload, CPUOffloadPolicy)
            and self._offload.pin_memory
            and device.type == "cpu"
            and self.device.type == "cuda"
        )
        return torch.zeros(self.plan.shard_numel, dtype=dtype, device=device, pin_memory=is_pinned)

    @property
    def orig_dtype(self) -> torch.dtype:
        """The dtype of the sharded parameters."""
        return self._orig_dtype

    @property
    def is_kept(self) -> bool:
        """True between forward and backward where neighbouring ranks share the whole."""
        return self._kept is not None

    def to_send(self) -> torch.Tensor:
        """Returns what this rank gives to a gather: its flat buffer, in one dtype or another."""
        self.lay_out()
        assert self._flat is not None
        if self._is_misplaced:
            refuse_device(self.params[0], self._flat.device, self.device, self.sharding.mesh.get_rank())
        if self._kept is not None:
            return self._kept[0]
        self.gathered = versions(self.params, self._flat)
        return latest(self.cast_shards, self.params, self._flat, self.compute_dtype)

    def gather_group(self) -> ProcessGroup:
        """The ranks among which it is gathered next."""
        return self.sharding.shard_group if self._kept is None else self.sharding.group_after_forward(self._kept[1])

    def show(self) -> list[ForeignTensor]:
        """Have the modules compute with the gathered parameters. Returns the places where a module has something else
        than the shard, and keeps that."""
        if self.shown.is_whole:
            return []
        assert self._unsharded is not None
        others = self.shown.show(self._unsharded.parameters)
        if self.grad_sums is not None:
            self.grad_sums.watch()
        return others

    def hide(self) -> None:
        """Let modules, and whoever asks them, have the shards; the gathered parameters keep their memory."""
        if self.shown.is_whole:
            self.shown.hide()

    def allocated(self) -> UnshardedParams:
        """Memory for the gathered parameters; new tensors where what they are to be has changed."""
        unsharded, dtype = self._unsharded, self.compute_dtype
        if unsharded is not None and unsharded.dtype == dtype and unsharded.device == self.device:
            unsharded.allocate()
            return unsharded
        unsharded = self._unsharded = UnshardedParams(self.params, self.plan, dtype, self.device)
        self.shown.forget()
        for param, whole in zip(self.params, unsharded.parameters, strict=True):
            param.unsharded = whole
        self.watch_buckets()
        return unsharded

    def watch_buckets(self) -> None:
        """Registers hooks for the gradients of parameters that are reduced in buckets; once for each gathered
        parameter."""
        buckets = self.state.buckets
        if buckets is None or self.gradient_is_ready is None or self._unsharded is None:
            return
        for number, bucket in enumerate(buckets.params):
            for param in bucket:
                assert isinstance(param, ShardedParam)
                if param.unsharded is not None and param.unsharded.requires_grad:
                    call_when_added(param.unsharded, param, partial(_tell, ref(self), number))

    def finish_gathering(self) -> None:
        """Order the current stream (CPU: the host) after the gather."""
        assert self.gathering is not None
        self.gathering.finish()

    def free(self, keep_on: int | None) -> None:
        """Give the memory of the gathered parameters back.

        `keep_on` that many neighbouring ranks: keep this rank's part of what they hold together, for the next gather.
        """
        assert self._unsharded is not None
        if keep_on is not None:
            num_ranks = post_forward_mesh_size(self.sharding.num_shards, keep_on)
            self._kept = self._unsharded.part_on(self.sharding.shard_rank, num_ranks), num_ranks
        self.hide()
        self._unsharded.free()

    def drop_part(self) -> None:
        """Give that part back, when it has been sent, or is not needed."""
        self._kept = None

    def holds(self, tensor: torch.Tensor) -> bool:
        """True for a gathered parameter and views of it."""
        base = base_of(tensor)
        if type(base) is torch.Tensor:
            return False  # no parameter: asked of each output
        return any(param.unsharded is base for param in self.params)

    def drop_cast(self) -> None:
        """Forget shards in the dtype that is gathered, which were cast for gathers that have been."""
        self.cast_shards = None

    def forget_run(self) -> None:
        """Have the shards alone. Waits for nothing: what is under way, or gathered, was never computed."""
        self.gathering = self._kept = None
        if self._unsharded is not None:
            self.hide()
            self._unsharded.free()
        self.drop_cast()
        self.drop_grads()
        self.state.forget_run()

    def drop_grads(self) -> None:
        """Forget unsharded gradients that have not been reduced, and those not reduced over the replicas."""
        self.unreduced.clear()
        for param in self.params:
            param.drop_grad()

    def zero_grads(self, *, set_to_none: bool) -> None:
        """Clear the gradients of the shards, and those that are on their way to them."""
        if self.comm is not None:
            self.comm.drop_reductions(self)
        for param in self.params:
            if set_to_none or param.sharded.grad is None:
                param.sharded.grad = None
            else:
                param.sharded.grad = torch.zeros_like(param.sharded.grad)

    def take_grads(self) -> list[torch.Tensor] | None:
        """Takes the gradients of all gathered parameters, where each has a plain one as it is to be reduced; else None,
        and nothing is taken."""
        unsharded = self._unsharded
        if unsharded is None or not self._is_cut_in_front or have_earlier_grads(self.params):
            return None
        grads = plain_gradients(unsharded.parameters)
        if grads is None or len(grads) < len(self.params):
            return None
        drop_gradients(unsharded.parameters)
        return grads

    @property
    def has_grads(self) -> bool:
        """True where a backward pass has left gradients of gathered parameters that have not been reduced."""
        wholes = [whole for param in self.params if (whole := param.unsharded) is not None]
        return not are_same(gradients_of(wholes), repeat(None)) or have_earlier_grads(self.params)

    @property
    def has_unreduced(self) -> bool:
        """True where earlier backward passes have left gradients to be reduced over the replicas."""
        return bool(self.unreduced)

    def keep_grads(self) -> None:
        """Keep the gradients of this backward pass for one that reduces, in the dtype in which they will be reduced."""
        if self.reduce_dtype != self.compute_dtype:
            for param in self.params:
                param.keep_grad(self.reduce_dtype)

    def sum_grads_as_they_come(self, is_asked: bool) -> None:
        """Do so with each gradient, for a schedule that reduces the sum of many; or no longer."""
        if self.grad_sums is not None:
            self.grad_sums.stop()
        is_needed = is_asked and self.reduce_dtype != self.compute_dtype
        self.grad_sums = GradSums(self.params, self.reduce_dtype) if is_needed else None

    def take_reduced(self, done: UnderWay) -> None:
        """Order the current stream after a reduction of this group, give each receiver its gradient, call its hooks."""
        comm = self.own_comm()
        done.reduction.wait(comm.streams)
        if done.grads is not None:
            hand_out(done.grads, done.receivers, comm.several_grads)
            return
        if not done.is_complete:
            parts = done.output.split(done.plan.split_sizes)
            self.unreduced.update(
                (param, part) for param, part in zip(done.receivers, parts, strict=True) if param is not None
            )
            return
        with out_of_grad():
            flat = done.output.to(self._orig_dtype)
            if self.is_offloaded:
                is_pinned = self._flat is not None and self._flat.is_pinned()
                flat = to_host(flat, done.receivers, comm, is_pinned=is_pinned)
            hand_out(parts_of(flat, done.receivers, done.plan.slots), done.receivers, comm.several_grads)

    def own_comm(self) -> Comm:
        """The model's shared buffers; a group that is used before the model's first forward gets its own."""
        if self.comm is None:
            self.comm = Comm(self.device)
        return self.comm


def _tell(group: ref[ParamGroup], bucket: int, param: ShardedParam) -> None:
    """A parameter of a bucket has its gradient."""
    there = group()
    if there is not None and there.gradient_is_ready is not None:
        there.gradient_is_ready(bucket, param)
