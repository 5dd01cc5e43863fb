"""Parameters with methods of their own around the gather, such as 8-bit weights with scales.

A tensor subclass has both of torch's methods:

    fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy) -> (inputs, metadata)
    fsdp_post_all_gather(outputs, metadata, param_dtype, *, out=None) -> (whole, inner tensors), or None with `out`

The first is asked of this rank's shard; `mesh` has the ranks that share it. Each input is gathered along its first dim;
one with the shard's shape is padded to that of the first rank's shard. The second makes the parameter to compute with,
of `outputs` and maybe other inner tensors; their memory is freed and comes again with the whole, so with `out`, which
is what the first call made, only the rest of it is to be updated.

Instead of the parameter a module may have them: `module.fsdp_gather_hooks(name)` gives None, or an object with these
methods, which take the shard first. Then shards are plain tensors. Where all of a group's objects are of one class that
has it, its method

    fsdp_pre_all_gather_together(hooks, shards, mesh, outer_sizes) -> (kinds, metadata, write)

is asked in place of the first: of each shard the shapes and dtypes of its inputs, with padding, and its metadata.
`write(sent, starts)` writes them all into `sent`, a buffer of bytes, each input from its byte in `starts` on. A gather
within backward sends what was written for the one before again, where shards have not been written to since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import nn

from disttrain.dtensor import DTensor
from disttrain.dtensor.local_part import local_part
from disttrain.dtensor.spec.shard_sizes import contiguous_strides
from disttrain.dtensor.views.data import num_data_writes
from disttrain.errors import ShardingError
from disttrain.fsdp2._torch import backward_is_running, values_of, versions_of
from disttrain.fsdp2.faults.checks import common_dtype, refuse_device
from disttrain.fsdp2.machine.unit import Unit
from disttrain.fsdp2.params.packing import Kind, Unpacking, packed, packing_of
from disttrain.fsdp2.params.param import Owner, ShardedParam, versions
from disttrain.fsdp2.params.param_group import ParamGroup
from disttrain.fsdp2.params.unsharded import UnshardedParams, wrapped


def has_gather_hooks(fqn: str, parameter: torch.Tensor, owners: Sequence[Owner], dim: int, rank: int) -> bool:
    """True for such a parameter. Raises ShardingError if it has only one of the methods, or is sharded along another
    dim.

    What a module says counts only of a parameter of its own alone, cut along the first dim; else all is gathered.
    """
    if dim == 0 and _hooks_of_module(owners) is not None:
        return True
    tensor = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.detach()
    hooks = [name for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather") if hasattr(tensor, name)]
    if len(hooks) == 1:
        problem = f"the {type(tensor).__name__} of parameter {fqn} has {hooks[0]} alone."
        raise ShardingError("fully_shard", problem, "Give it both methods, before and after the gather.", rank=rank)
    if hooks and dim != 0:
        problem = f"parameter {fqn} has methods around the gather, and is to be cut along dim {dim}."
        raise ShardingError("fully_shard", problem, "Let shard_placement_fn return None for it.", rank=rank)
    return bool(hooks)


def _hooks_of_module(owners: Sequence[Owner]) -> Any:
    ask = getattr(owners[0].module, "fsdp_gather_hooks", None) if len(owners) == 1 else None
    return None if ask is None else ask(owners[0].name)


@dataclass(frozen=True)
class _ShardInputs:
    """Tells the inputs that are gathered of a shard, each of one size on every rank. `make` is what comes after."""

    param: ShardedParam
    make: Callable[..., Any]
    kinds: tuple[Kind, ...]
    metadata: Any


@dataclass(frozen=True)
class _Sent:
    """Bytes that were made of shards whose values were `of`."""

    inputs: Sequence[_ShardInputs]
    memory: torch.Tensor
    of: tuple[int, ...]


class ExtensionGroup(ParamGroup):
    """A group of such parameters: all of their inputs are gathered as bytes, at once. Gradients are as any other's."""

    keeps_part = False
    _inputs: Sequence[_ShardInputs] = ()
    _sent_numel = 0
    _sent: _Sent | None = None
    """Bytes for the gather in backward, while that is to come."""

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_inputs": (), "_sent": None}

    def lay_out(self) -> None:
        """Give each shard memory of its own, on the device where shards are kept."""
        for param in self.params:
            if not param.is_laid_out():
                self.shown.forget()
                param.adopt_registered()
                if param.is_in_place():
                    continue
                local = local_part(param.sharded)
                with torch.inference_mode(False), torch.no_grad():
                    param.lay_out(local.detach().clone().to(self._shard_device(local)))
        self._use_dtype(common_dtype(self.params, self.sharding.mesh.get_rank()))

    @property
    def gather_dtype(self) -> torch.dtype:
        return torch.uint8

    @property
    def sent_numel(self) -> int:
        return self._sent_numel

    @property
    def is_gathered_in_place(self) -> bool:
        return False

    @property
    def sends_shards(self) -> bool:
        return False

    def to_send(self) -> torch.Tensor:
        """The bytes of what shards give, which is made on the current stream."""
        self.lay_out()
        for param in self.params:
            device = param.sharded.device
            if device.type == "meta" or device not in (self.device, self._shard_device(param.sharded)):
                refuse_device(self.params[0], device, self.device, self.sharding.mesh.get_rank())
        self.gathered = versions(self.params, None)
        has_backward = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.no_grad():
            self._inputs, sent = self._made(has_backward)
        self._sent_numel = sent.numel()
        return sent

    def drop_cast(self) -> None:
        super().drop_cast()
        self._sent = None

    def given_bytes(self) -> int:
        """Counts what each rank sends, as far as its methods say without values; they see a shard without memory."""
        with torch.no_grad():
            shards = (torch.empty_like(local_part(param.sharded), device="meta") for param in self.params)
            inputs = [self._give(param, shard)[0] for param, shard in zip(self.params, shards, strict=True)]
        return packing_of(_kinds(inputs)).num_bytes

    def _made(self, has_backward: bool) -> tuple[Sequence[_ShardInputs], torch.Tensor]:
        """Makes what is gathered, or takes what was made for forward in a backward."""
        earlier, self._sent = self._sent, None
        locals_ = [local_part(param.sharded) for param in self.params]
        hooks = [_hooks_of_module(param.owners) for param in self.params]
        if not hasattr(hooks[0], "fsdp_pre_all_gather_together") or len({type(each) for each in hooks}) > 1:
            pairs = [self._give(param, self._brought(local)) for param, local in zip(self.params, locals_, strict=True)]
            each = [pair[0] for pair in pairs]
            return each, packed([*chain.from_iterable(pair[1] for pair in pairs)], packing_of(_kinds(each)))
        # Only for a backward: nobody counts what a kernel, a collective or a graph that is replayed writes.
        is_within_backward = backward_is_running()
        shards = [param.sharded for param in self.params]
        values = (num_data_writes(shards), *versions_of(shards), *values_of(locals_))
        if is_within_backward and earlier is not None and earlier.of == values:
            return earlier.inputs, earlier.memory
        inputs, sent = self._give_together(hooks, [*map(self._brought, locals_)])
        unit = self.state.unit
        if has_backward and not is_within_backward and isinstance(unit, Unit) and unit.frees_after_forward:
            self._sent = _Sent(inputs, sent, values)
        return inputs, sent

    def _brought(self, local: torch.Tensor) -> torch.Tensor:
        return local if local.device == self.device else local.to(self.device, non_blocking=True)

    def _give_together(
        self, hooks: Sequence[Any], shards: Sequence[torch.Tensor]
    ) -> tuple[Sequence[_ShardInputs], torch.Tensor]:
        sizes = [torch.Size(param.shape) for param in self.params]
        kinds, metadata, write = hooks[0].fsdp_pre_all_gather_together(hooks, shards, self.sharding.shard_mesh, sizes)
        inputs = [
            _ShardInputs(param, partial(hook.fsdp_post_all_gather, shard), *each)
            for param, hook, shard, *each in zip(self.params, hooks, shards, kinds, metadata, strict=True)
        ]
        packing = packing_of(_kinds(inputs))
        sent = torch.empty(packing.num_bytes, dtype=torch.uint8, device=self.device)
        write(sent, packing.starts)
        return inputs, sent

    def _give(self, param: ShardedParam, local: Any) -> tuple[_ShardInputs, tuple[torch.Tensor, ...]]:
        hooks = _hooks_of_module(param.owners)
        before, after = (
            (local.fsdp_pre_all_gather, local.fsdp_post_all_gather)
            if hooks is None
            else (partial(hooks.fsdp_pre_all_gather, local), partial(hooks.fsdp_post_all_gather, local))
        )
        tensors, metadata = before(
            self.sharding.shard_mesh,
            torch.Size(param.shape),
            contiguous_strides(param.shape),
            param.owners[0].module,
            self._policy,
        )
        num_rows = -(-param.shape[0] // self.sharding.num_shards)
        tensors = tuple(_padded(tensor, local.shape, num_rows) for tensor in tensors)
        return _ShardInputs(param, after, tuple((tensor.shape, tensor.dtype) for tensor in tensors), metadata), tensors

    def allocated(self) -> _GatheredParts:
        unsharded = self._unsharded
        if not isinstance(unsharded, _GatheredParts) or not unsharded.fits(
            self._inputs, self.compute_dtype, self.device
        ):
            unsharded = self._unsharded = _GatheredParts(
                self._inputs, self.sharding.num_shards, self.compute_dtype, self.device
            )
            self.shown.forget()
        unsharded.allocate()
        unsharded.inputs, self._inputs = self._inputs, ()
        return unsharded


class _GatheredParts(UnshardedParams):
    """The outputs of the gather, and the parameters made of them, whose memory comes and goes with theirs."""

    def __init__(
        self, inputs: Sequence[_ShardInputs], num_shards: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dtype, self.device = dtype, device
        self.is_cut_in_front = False
        self.parameters: list[nn.Parameter] = []
        self.inputs = inputs
        self._kinds = [shard.kinds for shard in inputs]
        self._unpacking = Unpacking(_kinds(inputs), num_shards, device)
        outputs = iter(self._unpacking.tensors)
        self._outputs = [tuple(islice(outputs, len(kinds))) for kinds in self._kinds]
        storages = [tensor.untyped_storage() for tensor in self._unpacking.tensors]
        self._memory = [(storage, storage.nbytes()) for storage in storages]

    def fits(self, inputs: Sequence[_ShardInputs], dtype: torch.dtype, device: torch.device) -> bool:
        """True where parameters made once can be filled with these inputs."""
        return (self.dtype, self.device, self._kinds) == (dtype, device, [shard.kinds for shard in inputs])

    def allocate(self) -> None:
        for storage, num_bytes in self._memory:
            storage.resize_(num_bytes)

    def free(self) -> None:
        for storage, _ in self._memory:
            storage.resize_(0)

    def write(self, gathered: torch.Tensor, are_written: Sequence[bool] | None = None) -> None:
        self._unpacking.fill(gathered)
        is_first = not self.parameters
        for index, (shard, outputs) in enumerate(zip(self.inputs, self._outputs, strict=True)):
            if is_first:
                self._make(shard, outputs)
            else:
                made: torch.Tensor = self.parameters[index]
                made = made._local_tensor if isinstance(made, DTensor) else made
                shard.make(outputs, shard.metadata, self.dtype, out=made)
        self.inputs = ()

    def _make(self, shard: _ShardInputs, outputs: tuple[torch.Tensor, ...]) -> None:
        param = shard.param
        whole, inner = shard.make(outputs, shard.metadata, self.dtype)
        # Inner tensors may be the outputs themselves.
        addresses = {storage.data_ptr() for storage, _ in self._memory}
        for storage in (tensor.untyped_storage() for tensor in inner):
            if storage.data_ptr() not in addresses:
                self._memory.append((storage, storage.nbytes()))
        if tuple(whole.shape) != param.shape:
            whole = whole.as_strided(param.shape, contiguous_strides(param.shape), 0)
        if param.unsharded_spec is not None:
            whole = wrapped(whole, param.unsharded_spec)
        param.unsharded = nn.Parameter(whole, requires_grad=param.sharded.requires_grad)
        self.parameters.append(param.unsharded)


def _kinds(inputs: Sequence[_ShardInputs]) -> tuple[Kind, ...]:
    return tuple(chain.from_iterable(shard.kinds for shard in inputs))


def _padded(tensor: torch.Tensor, shard_shape: torch.Size, num_rows: int) -> torch.Tensor:
    if tensor.shape != shard_shape or tensor.shape[0] == num_rows:
        return tensor
    padded = tensor.new_zeros((num_rows, *tensor.shape[1:]))
    padded.narrow(0, 0, tensor.shape[0]).copy_(tensor)
    return padded
