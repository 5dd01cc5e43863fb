"""The parameters that are gathered and reduced together: those of one `fully_shard` call that share a dtype."""

from __future__ import annotations

import torch

from disttrain.errors import ShardingError
from disttrain.fsdp2._torch import base_of
from disttrain.fsdp2.collectives import Gather, Reduction, copy_out, start_gather, start_reduction
from disttrain.fsdp2.flat import FlatPlan, plan_flat
from disttrain.fsdp2.param import ShardedParam
from disttrain.fsdp2.policies import MixedPrecisionPolicy
from disttrain.fsdp2.streams import CommStreams
from disttrain.mesh import DeviceMesh


class Comm:
    """What all groups of one model share: streams, and the buffers that a stream may still be reading."""

    def __init__(self, device: torch.device) -> None:
        self.streams = CommStreams(device)
        self.copied_out: tuple[torch.Tensor, torch.cuda.Event | None] | None = None
        self.reducing: tuple[ParamGroup, Reduction, FlatPlan, list[ShardedParam | None]] | None = None

    def release_gathered(self) -> None:
        """Let go of the last gathered buffer, once the all-gather stream knows that it has been copied out."""
        if self.copied_out is not None:
            with self.streams.gathering():
                self.streams.follow(self.copied_out[1])
            self.copied_out = None

    def drop_reduction(self) -> None:
        """Wait for the reduce-scatter under way, if any, and forget what it brings."""
        if self.reducing is not None:
            _, reduction, _, _ = self.reducing
            self.reducing = None
            reduction.wait(self.streams)

    def finish_reduction(self) -> None:
        """Hand the gradients of the reduce-scatter under way, if any, to their parameters."""
        if self.reducing is not None:
            group, reduction, plan, receivers = self.reducing
            self.reducing = None
            group.take_reduced(reduction, plan, receivers)


class ParamGroup:
    """Gathers its parameters before they are needed, frees them after, reduces their gradients.

    Sharded values of all parameters lie in one flat buffer, so gathering copies nothing in, or casts once.
    """

    def __init__(self, params: list[ShardedParam], mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
        self.params = params
        self.comm: Comm | None = None
        self.reduces_grads = True
        self._mesh = mesh
        self._policy = policy
        self._orig_dtype = params[0].orig_dtype
        self._num_shards = mesh.size()
        self._plan = plan_flat([param.shape for param in params], self._num_shards)
        self._flat: torch.Tensor | None = None
        self._gather: Gather | None = None
        self.is_unsharded = False
        self.lay_out()

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the gathered parameters."""
        return self._policy.param_dtype or self._orig_dtype

    def __getstate__(self) -> dict[str, object]:
        """What a deep copy takes over; it brings its shards into a buffer of its own when it is first gathered."""
        return {**self.__dict__, "comm": None, "_flat": None, "_gather": None, "is_unsharded": False}

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
            flat = torch.zeros(self._plan.shard_numel, dtype=self._orig_dtype, device=locals_[0].device)
            for param, local, slot in zip(self.params, locals_, self._plan.slots, strict=True):
                view = param.slot_view(flat, slot)
                view.copy_(local)
                param.lay_out(view)
        self._flat = flat

    def _common_dtype(self) -> torch.dtype:
        dtypes = {param.orig_dtype: param.fqn for param in self.params}
        if len(dtypes) > 1:
            raise ShardingError(
                "fully_shard",
                f"parameters that are gathered together have become of different dtypes: {dtypes}.",
                "Convert all of them alike, or before fully_shard.",
                rank=self._mesh.get_rank(),
            )
        return next(iter(dtypes))

    def unshard(self) -> None:
        """Start gathering; nothing when the parameters are gathered, or being gathered, already. Collective."""
        if self.is_unsharded or self._gather is not None:
            return
        self.lay_out()
        comm = self._comm()
        assert self._flat is not None
        comm.release_gathered()
        group = self._mesh.get_group()
        self._gather = start_gather(self._flat, self.compute_dtype, self._num_shards, group, comm.streams)

    def wait_for_unshard(self) -> None:
        """Have the modules compute with the gathered parameters."""
        if self._gather is None:
            return
        comm, gather = self._comm(), self._gather
        self._gather = None
        gather.wait(comm.streams)
        with torch.inference_mode(False), torch.no_grad():
            buffers = [
                param.make_unsharded(slot, self._num_shards, self.compute_dtype, gather.output.device)
                for param, slot in zip(self.params, self._plan.slots, strict=True)
            ]
            copy_out(gather.output, self._plan, buffers)
        # The buffer belongs to the all-gather stream: it must not be handed out again while it is being read here.
        comm.copied_out = (gather.output, comm.streams.mark())
        for param in self.params:
            param.show_unsharded()
        self.is_unsharded = True

    def reshard(self) -> None:
        """Free the gathered parameters; a gather that nobody has waited for is waited for first."""
        self.wait_for_unshard()
        if not self.is_unsharded:
            return
        for param in self.params:
            param.show_sharded()
            param.free_unsharded()
        self.is_unsharded = False

    def holds(self, tensor: torch.Tensor) -> bool:
        """True for a gathered parameter and views of it."""
        base = base_of(tensor)
        return any(param.unsharded is base for param in self.params)

    def drop_grads(self) -> None:
        """Forget whole gradients that have not been reduced."""
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

    def has_grads(self) -> bool:
        """True when a backward pass has left gradients of whole parameters that have not been reduced."""
        wholes = [param.unsharded for param in self.params if param.unsharded is not None]
        return any(whole.grad is not None and whole.numel() > 0 for whole in wholes)

    def reduce_grads(self) -> None:
        """Start averaging the whole gradients over the ranks into the sharded parameters'. Collective.

        A trainable parameter without a gradient takes part with zeros, so that sizes agree on all ranks, but gets none.
        """
        if not self.reduces_grads or not self.has_grads():
            return
        comm = self._comm()
        trainable = [(param, param.unsharded) for param in self.params if param.unsharded is not None]
        # What has no elements has nothing to reduce.
        trainable = [(param, whole) for param, whole in trainable if whole.requires_grad and whole.numel() > 0]
        receivers = [None if whole.grad is None else param for param, whole in trainable]
        grads = [torch.zeros_like(whole) if whole.grad is None else whole.grad for _, whole in trainable]
        for _, whole in trainable:
            whole.grad = None
        comm.finish_reduction()
        plan = self._plan
        if len(trainable) < len(self.params):
            plan = plan_flat([param.shape for param, _ in trainable], self._num_shards)
        dtype = self._policy.reduce_dtype or self.compute_dtype
        with torch.no_grad():
            reduction = start_reduction(grads, plan, dtype, self._mesh.get_group(), comm.streams)
        comm.reducing = (self, reduction, plan, receivers)

    def take_reduced(self, reduction: Reduction, plan: FlatPlan, receivers: list[ShardedParam | None]) -> None:
        """Order the current stream after a reduction of this group, and give each receiver its gradient."""
        reduction.wait(self._comm().streams)
        with torch.no_grad():
            flat = reduction.output.to(self._orig_dtype)
            for param, slot in zip(receivers, plan.slots, strict=True):
                if param is not None:
                    param.accumulate_grad(param.slot_view(flat, slot))

    def _comm(self) -> Comm:
        """The model's shared buffers; a group that is used before the model's first forward gets its own."""
        if self.comm is None:
            assert self._flat is not None
            self.comm = Comm(self._flat.device)
        return self.comm
